"""Everything that one rank holds during a training step, item by item, at four moments.

Psi is the parameters on a rank, N the GPUs over which ZeRO shards them, w, g and k bytes per
parameter of weights, gradients and optimizer; s is the sequence, b the micro-batch, h hidden, f
ffn, V the vocabulary, t the ranks of tensor parallelism, p pipeline stages, v chunks a rank.
1 GB = 10^9 bytes.
"""

from functools import lru_cache
from typing import NamedTuple

from parlab.memory.activations import RECOMPUTE, layers_in_flight
from parlab.memory.layer import (
    ask,
    embedding_mask,
    layer_step,
    maker,
    vocab_share,
)
from parlab.memory.rank import layers_backward, rank_params, rank_states
from parlab.memory.states import (
    BYTE_RECIPES,
    MOST_GPUS,
    require_expert_parallel,
    require_stage,
)
from parlab.models import ModelConfig
from parlab.units import require_bool, require_choice, require_int, require_number

MOMENTS = ("after the step", "loss", "backward", "optimizer")
LOSSES = ("torch", "megatron", "fused")
# What the CUDA context takes when kernels are loaded at their first use (about 300 MB; all at once
# took more than 1000 MB): https://github.com/pytorch/pytorch/issues/107667. NCCL's buffers come
# on top. An H200 with CUDA 13 took 804 MB (data/measurements).
CUDA_CONTEXT_BYTES = 300_000_000
_ADAM_IN_FP32 = ("mixed-precision", "autocast", "fp32-gradients", "fp16-main-gradients")


class StepItem(NamedTuple):
    """Something that a rank holds, and its bytes at each of `MOMENTS`."""

    name: str
    group: str  # "states", "activations" or "on top"
    bytes: tuple


class TrainingMemory(NamedTuple):
    """Items on the card, which sum to the total of each moment."""

    rows: tuple  # (name, group, bytes) of each item
    pipeline_rank: int
    host_bytes: float  # what offloading moved to the host

    @property
    def items(self):
        """The rows as StepItems, made when asked for: a search reads totals only."""
        return tuple(map(StepItem._make, self.rows))

    @property
    def totals(self):
        """Bytes at each of `MOMENTS`."""
        return tuple(map(sum, zip(*[row[2] for row in self.rows], strict=True)))

    def at(self, moment):
        """Bytes at one of `MOMENTS`."""
        return self.totals[MOMENTS.index(require_choice("moment", moment, MOMENTS))]

    @property
    def after_step(self):
        """Bytes between two steps, before gradients are freed."""
        return self.totals[0]

    @property
    def peak(self):
        """Bytes at the fullest moment."""
        return max(self.totals)

    @property
    def peak_moment(self):
        """The fullest of `MOMENTS`."""
        totals = self.totals
        return MOMENTS[totals.index(max(totals))]


_make_memory = maker(TrainingMemory)


def training_memory(
    config,
    micro_batch,
    *,
    sequence,
    n_gpus=1,
    stage=0,
    recipe="mixed-precision",
    tp=1,
    sequence_parallel=False,
    pipeline=1,
    chunks=1,
    pipeline_rank=None,
    expert_parallel=1,
    expert_load=1,
    recompute="none",
    flash=True,
    dropout=False,
    loss="torch",
    keep_logits=True,
    keep_gradients=False,
    gradient_as_bucket_view=False,
    reshard_after_forward=True,
    prefetch=1,
    offload=False,
    foreach=True,
    reserved=False,
    fragmentation=0,
    context_bytes=0,
):
    """Bytes that one rank holds during a training step, by item, at four moments.

    "after the step": the model states of `zero_memory`, gradients not yet freed. "loss": forward
    has ended. "backward": where it is fullest, which is in the loss's own backward, or in the last
    layer with all activations, or in the first with all gradients (layers are alike, so nothing
    between is fuller). "optimizer": inside its step.

    Activations are those of `activation_memory`; Korthikanti et al. (arXiv 2205.05198), section
    4.3, has those of embedding and head. Under stage 3 FSDP2 (torch.distributed.fsdp.fully_shard)
    holds the layer at work and `prefetch` more in 16 bits, and in its root group the embedding and
    the head from first to last; a gradient is in flight as backward makes it and, of the layer
    before, as it is reduced, in g bytes; stage 2 is taken to reduce in the same way. Parameters of
    the rank are counted exactly; a tied head has a copy of the embedding if p > 1.

    config: a ModelConfig. micro_batch: b. sequence: s. n_gpus: N, data-parallel ranks, over which
        `stage` of ZeRO shards; N t p GPUs in all. recipe: a name in BYTE_RECIPES; those with fp32
        weights run under autocast, which keeps its 16-bit casts until backward has used them. Not
        compiled, torch.autocast keeps more of each layer: see `autocast_memory`.
    tp, sequence_parallel, pipeline, chunks, recompute, flash, dropout, expert_load: as in
        `activation_memory`. pipeline_rank: None is the fullest (the first or the last).
        expert_parallel: as in `expert_zero_memory`.
    loss: "torch" (cross_entropy) keeps a log-softmax in fp32 and makes two fp32 gradients of it, 12
        bytes a logit; "megatron" works in place and makes one in 16 bits, 6; "fused" never has all
        logits. keep_logits: True if a variable holds the model's 16-bit output through backward.
    keep_gradients: True if they are there when forward starts: accumulated over micro-batches (a
        pipeline always does), or in a buffer that lasts; False if zero_grad freed them.
    gradient_as_bucket_view: stage 0 with N > 1; False, DDP's default, copies gradients to buckets.
    reshard_after_forward: stage 3; False holds all layers from forward to backward.
    offload: moves what `stage` cuts to the host, as FSDP2's CPUOffloadPolicy (stage 3) does.
    foreach: torch's default on a GPU, updates all parameters at once: Adam makes 4 bytes for each,
        and fp32 masters need as much for fp32 gradients. False: one at a time, or fused.
    reserved: True adds, under stage 3, what the caching allocator keeps for FSDP2's own streams,
        since no other stream may use it: buffers of gathers, and sharded gradients even when freed.
    fragmentation: reserved minus allocated, as a fraction of the allocated bytes.
    context_bytes: of CUDA itself, which torch's gauges leave out: about CUDA_CONTEXT_BYTES; with
        all kernels loaded at once more (Hugging Face's "Model training anatomy": 1343 MB).
    Raises ValueError or TypeError for what is not allowed or does not divide.

    >>> from parlab.models import model
    >>> step = training_memory(model("llama-3-8b"), 1, sequence=8192, n_gpus=8, stage=3)
    >>> [round(total / 1e9, 2) for total in step.totals]
    [16.06, 66.65, 75.05, 24.09]
    >>> [item.bytes[1] for item in step.items if item.name.startswith("logits")]
    [2101346304, 4202692608]
    """
    if not isinstance(config, ModelConfig):
        raise TypeError(f"config must be a ModelConfig, got {config!r:.60}")
    if config.positions is not None:
        why = "no position was learned for a later token"
        require_int("sequence", sequence, minimum=1, maximum=config.positions, why=why)
    stage, recipe, recompute, loss, prefetch, fragmentation, context_bytes = ask(
        _options,
        (stage, recipe, recompute, loss, prefetch, fragmentation, context_bytes)
        + (keep_logits, keep_gradients, gradient_as_bucket_view, reshard_after_forward)
        + (offload, foreach, reserved),
    )
    shape = (config, micro_batch, sequence, tp, sequence_parallel, dropout, flash, expert_load)
    sizes, layer, again, inside = ask(layer_step, (*shape, recompute))
    pipeline = require_int("pipeline", pipeline, minimum=1)
    tp = int(tp)  # not NumPy's, whose products wrap around
    n = require_int("n_gpus", n_gpus, minimum=1, maximum=MOST_GPUS)
    expert_parallel = require_expert_parallel(expert_parallel, config, n)
    each = BYTE_RECIPES[recipe].of_each
    buckets = stage == 0 and n > 1
    keep = keep_gradients or pipeline > 1 or (buckets and gradient_as_bucket_view)
    keep = keep or (reserved and stage == 3)

    def on_rank(rank):
        held = layers_in_flight(config.layers, pipeline, chunks, rank)
        rank = int(rank)
        part = rank_params(config, tp, pipeline, rank, expert_parallel)
        weights, gradients, optimizer, updated = rank_states(part, each, n, expert_parallel, stage)
        before = gradients if keep else 0
        head = logits = 0
        if rank == pipeline - 1:
            head = 4 * sizes.wide  # inputs of the last norm and of the head
            logits = 0 if loss == "fused" else sizes.tokens * vocab_share(config.vocab, tp)
        logit_gradients = (8 if loss == "torch" else 2) * logits

        # Gradients, activations, those again, gradients inside a layer, in flight, gathered, casts.
        together = min(1 + prefetch, part.layers) if reshard_after_forward else part.layers
        in_layers = layers_backward(
            part,
            each,
            stage,
            n,
            layer,
            held,
            again,
            inside,
            sizes.wide,
            before,
            gradients,
            together,
        )
        all_gathered = 0 if reshard_after_forward or stage < 3 else 2 * part.layer * part.layers
        all_casts = (
            2 * (part.matrices * part.layers + part.head) if each[0] == 4 and stage < 3 else 0
        )
        during = (before, held * layer, 0, 0, 0, all_gathered, all_casts)
        still = sum(during) + head + 4 * logits + logit_gradients >= sum(in_layers)
        made, waiting, anew, within, reducing, gathered, casts = during if still else in_layers

        host = 0
        if offload:
            host, optimizer = optimizer, 0
            if stage >= 2:
                host, gradients, before, made = host + gradients, 0, 0, 0
            if stage == 3:
                host, weights = host + weights, 0

        rows = [
            ("weights", "states", (weights, weights, weights, weights)),
            ("gradients", "states", (gradients, before, made, gradients)),
            ("optimizer", "states", (optimizer, optimizer, optimizer, optimizer)),
            ("layers", "activations", (0, held * layer, waiting, 0)),
        ]
        if anew:
            rows.append(("recomputed layer", "activations", (0, 0, anew, 0)))
        if within:
            rows.append(("gradients inside a layer", "activations", (0, 0, within, 0)))
        if dropout and rank == 0:
            mask = embedding_mask(sizes, pipeline, chunks)[2]
            rows.append(("dropout mask of the embedding", "activations", (0, mask, mask, 0)))
        if head:
            rows.append(("inputs of last norm and head", "activations", (0, head, still * head, 0)))
        if logits:
            if keep_logits:
                rows.append(("logits, 16 bits", "activations", (0, 2 * logits, 2 * logits, 0)))
            rows.append(("logits, fp32", "activations", (0, 4 * logits, still * 4 * logits, 0)))
            if still:
                rows.append(("gradients of the logits", "activations", (0, 0, logit_gradients, 0)))
        if stage == 3:
            rows.append(("gathered layers", "on top", (0, all_gathered, gathered, 0)))
            ends = 2 * part.ends
            rows.append(("gathered embedding and head", "on top", (0, ends, ends, 0)))
        if reducing:
            rows.append(("gradients being reduced", "on top", (0, 0, reducing, 0)))
        if buckets and not gradient_as_bucket_view:
            rows.append(("DDP buckets", "on top", (gradients,) * 4))
        if all_casts:
            rows.append(("casts of autocast", "on top", (0, all_casts, casts, 0)))
        if foreach and recipe in _ADAM_IN_FP32 and not offload:
            rows.append(("temporaries of foreach", "on top", (0, 0, 0, updated)))
            if recipe == "mixed-precision":
                rows.append(("fp32 copy of the gradients", "on top", (0, 0, 0, updated)))
        if fragmentation:
            totals = map(sum, zip(*[row[2] for row in rows], strict=True))
            lost = tuple([fragmentation * total for total in totals])
            rows.append(("fragmentation", "on top", lost))
        if reserved and stage == 3:
            idle = 2 * (part.ends + part.layer * max(1, prefetch))
            prefetched = max(0, gathered - 2 * part.layer) if reshard_after_forward else 0
            rows.append(
                ("idle buffers of gathers", "on top", (idle, idle, idle - prefetched, idle))
            )
        if context_bytes:
            rows.append(("CUDA context", "on top", (context_bytes,) * 4))
        return _make_memory((tuple(rows), rank, host))

    if pipeline_rank is None and pipeline > 1:
        first, last = on_rank(0), on_rank(pipeline - 1)
        return first if first.peak >= last.peak else last
    return on_rank(0 if pipeline_rank is None else pipeline_rank)


def training_memory_bytes(config, micro_batch, *, sequence, **options):
    """Bytes at the fullest moment of a step: the peak of `training_memory`, with its arguments."""
    return training_memory(config, micro_batch, sequence=sequence, **options).peak


@lru_cache(maxsize=1024, typed=True)  # a search varies few of them
def _options(
    stage,
    recipe,
    recompute,
    loss,
    prefetch,
    fragmentation,
    context_bytes,
    keep_logits,
    keep_gradients,
    gradient_as_bucket_view,
    reshard_after_forward,
    offload,
    foreach,
    reserved,
):
    """Check what does not depend on sizes; return it, less the flags."""
    stage = require_stage(stage)
    checked = (
        stage,
        require_choice("recipe", recipe, BYTE_RECIPES),
        require_choice("recompute", recompute, RECOMPUTE),
        require_choice("loss", loss, LOSSES),
        require_int("prefetch", prefetch, minimum=0),
        require_number("fragmentation", fragmentation, minimum=0),
        require_number("context_bytes", context_bytes, minimum=0),
    )
    require_bool("keep_logits", keep_logits)
    require_bool("keep_gradients", keep_gradients)
    require_bool("gradient_as_bucket_view", gradient_as_bucket_view)
    require_bool("reshard_after_forward", reshard_after_forward)
    require_bool("foreach", foreach)
    require_bool("reserved", reserved)
    if require_bool("offload", offload) and stage == 0:
        raise ValueError("offload must be False at stage 0, got True: it moves what ZeRO cuts")
    return checked
