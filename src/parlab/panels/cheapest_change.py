"""The cheapest change that makes a training step fit on a card, found by trying them.

The order of cost is a list, not a measurement:

- ZeRO stages 1 and 2 send no more than data parallel (arXiv 1910.02054, section 7);
- selective recomputation repeats the scores alone (arXiv 2205.05198, section 5);
- stage 3 sends 1.5 times as much as data parallel;
- smaller micro-batches make smaller matrices and more messages;
- full recomputation adds 1/3 to the compute of forward and backward;
- tensor parallelism in a node of 8 waits for 4 all-reduces a layer (arXiv 1909.08053, section 3);
- more GPUs cost money.
"""

from functools import lru_cache
from itertools import combinations
from typing import NamedTuple

from parlab.memory.step import CUDA_CONTEXT_BYTES, training_memory
from parlab.panels.sheet import MODELS, RECOMPUTE

GPUS = tuple(2**k for k in range(11))
MICRO_BATCHES, DEGREES, STAGES = (1, 2, 4, 8, 16), (1, 2, 4, 8), (0, 1, 2, 3)


class Setting(NamedTuple):
    """A training step; n_gpus = data parallel x tp, and ZeRO shards over the data parallel."""

    model: str
    sequence: int
    n_gpus: int
    micro_batch: int
    tp: int
    recompute: str
    stage: int

    @property
    def memory(self):
        """Everything on one GPU: 2+2+12 bytes, bf16, flash attention, no dropout."""
        return training_memory(
            MODELS[self.model],
            self.micro_batch,
            sequence=self.sequence,
            n_gpus=self.n_gpus // self.tp,
            stage=self.stage,
            tp=self.tp,
            sequence_parallel=self.tp > 1,
            recompute=self.recompute,
            context_bytes=CUDA_CONTEXT_BYTES,
        )


class Change(NamedTuple):
    """A new value of one field of a Setting, in words with what it costs."""

    field: str
    value: int | str
    words: str


@lru_cache(maxsize=4096)
def peak(setting):
    """Bytes at the fullest moment of the step."""
    return setting.memory.peak


def n_degrees(model, n_gpus):
    """Return how many of DEGREES cut the model evenly on so many GPUs."""
    config = MODELS[model]
    sizes = (config.heads, config.kv_heads, config.ffn, config.vocab)
    return sum(tp <= n_gpus and not any(size % tp for size in sizes) for tp in DEGREES)


def cheapest_changes(setting, usable_bytes):
    """Return the cheapest change after which the peak fits, or two, or None if there are none.

    Of two changes the more expensive one counts first.
    """
    changes = list(_changes(setting))
    for several in (1, 2):
        hopeful = {}
        for places in sorted(combinations(range(len(changes)), several), key=lambda c: c[::-1]):
            chosen = [changes[place] for place in places]
            moved = {change.field: change.value for change in chosen}
            group = (*moved, moved.get("stage"))
            if group not in hopeful:
                hopeful[group] = peak(far_end(setting, **moved)) <= usable_bytes
            if hopeful[group]:
                changed = setting._replace(**moved)
                if changed.tp <= changed.n_gpus and peak(changed) <= usable_bytes:
                    return chosen
    return None


def far_end(setting, **fields):
    """Return the setting with some fields as far as they go to save memory.

    A stage is taken as given: of two stages the higher one may need more, for it gathers layers.
    """
    ends = {"micro_batch": MICRO_BATCHES[0], "recompute": RECOMPUTE[-1], "n_gpus": GPUS[-1]}
    ends = {field: ends.get(field, value) for field, value in fields.items()}
    if "tp" in ends:
        n_gpus = ends.get("n_gpus", setting.n_gpus)
        ends["tp"] = DEGREES[n_degrees(setting.model, n_gpus) - 1]
    return setting._replace(**ends)


def _changes(setting):
    """Everything that one field can do for memory, cheapest first."""
    for stage in range(setting.stage + 1, 3):
        yield Change("stage", stage, f"stage {stage} (no more traffic)")
    if setting.recompute == "none":
        yield Change("recompute", "selective", "selective recompute")
    if setting.stage < 3:
        yield Change("stage", 3, "stage 3 (1.5 x traffic)")
    for size in reversed(MICRO_BATCHES):
        if size < setting.micro_batch:
            yield Change("micro_batch", size, f"b = {size}")
    if setting.recompute != "full":
        yield Change("recompute", "full", "full recompute (+33% compute)")
    for tp in DEGREES[: n_degrees(setting.model, GPUS[-1])]:
        if tp > setting.tp:
            yield Change("tp", tp, f"TP {tp}")
    for n_gpus in GPUS:
        if n_gpus > setting.n_gpus:
            yield Change("n_gpus", n_gpus, f"N = {n_gpus}")
