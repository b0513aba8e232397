"""A layout: how many ranks cut what, and the rules that a model, a batch and a cluster add."""

from dataclasses import dataclass, fields

from parlab.memory.layer import RECOMPUTE
from parlab.memory.states import require_stage
from parlab.units import require_bool, require_choice, require_int

SCHEDULES = ("1F1B", "ZB-H1")
MOST_RANKS = 10**6


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How a job is cut over dp x tp x pp x cp ranks.

    dp, tp, pp, cp: degrees of data, tensor, pipeline and context parallelism. ep: ranks over which
        experts spread, must divide dp cp: they are data-parallel ranks with other experts.
    zero: stage of ZeRO over the dp cp ranks; 3 is FSDP. replicas: of the shards (HSDP); ZeRO cuts
        over dp cp / replicas ranks that are neighbours, and gradients are summed across replicas.
    micro_batch: sequences of one rank at a time. chunks: v, stages that a pipeline rank has; more
        than one is interleaved 1F1B.
    schedule: "1F1B" or "ZB-H1" (zero bubble; as much memory; one chunk).
    recompute: "none", "selective", "full" or "per-op", as in `activation_memory`.
    sequence_parallel: norms and dropouts are cut along the sequence, over the tp ranks.

    Raises ValueError or TypeError for what is no layout of any model.

    >>> Layout(dp=4, tp=8, pp=16).world
    512
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    replicas: int = 1
    zero: int = 0
    micro_batch: int = 1
    chunks: int = 1
    schedule: str = "1F1B"
    recompute: str = "none"
    sequence_parallel: bool = False

    def __post_init__(self):
        for name in ("dp", "tp", "pp", "cp", "ep", "replicas"):
            self._set(name, require_int(name, getattr(self, name), minimum=1, maximum=MOST_RANKS))
        for name in ("micro_batch", "chunks"):
            self._set(name, require_int(name, getattr(self, name), minimum=1))
        self._set("zero", require_stage(self.zero))
        self._set("schedule", require_choice("schedule", self.schedule, SCHEDULES))
        self._set("recompute", require_choice("recompute", self.recompute, RECOMPUTE))
        require_bool("sequence_parallel", self.sequence_parallel)
        if self.replicas > 1 and self.zero == 0:
            raise ValueError(f"replicas must be 1 at stage 0, got {self.replicas}: nothing is cut")
        for name, size, why in (
            ("replicas", self.dp * self.cp, "they are groups of data-parallel ranks"),
            ("ep", self.shards, "experts spread over data-parallel ranks of one replica"),
        ):
            if size % getattr(self, name):
                raise ValueError(f"{name} must divide {size}, got {getattr(self, name)}: {why}")
        if self.chunks > 1 and self.pp == 1:
            raise ValueError(f"chunks must be 1 without a pipeline, got {self.chunks}")
        if self.chunks > 1 and self.schedule == "ZB-H1":
            raise ValueError(f"chunks must be 1 with ZB-H1, got {self.chunks}")

    def __str__(self):
        """The degrees above 1 and what is not the default, as people write it.

        >>> print(Layout(dp=4, tp=8, zero=1, recompute="full"))
        dp 4, tp 8, ZeRO-1, b 1, recompute full
        """
        words = [f"{n} {d}" for n in ("dp", "tp", "pp", "cp", "ep") if (d := getattr(self, n)) > 1]
        words += [f"v {self.chunks}"] if self.chunks > 1 else []
        words += [f"ZeRO-{self.zero}"] if self.zero else []
        words += [f"{self.replicas} replicas"] if self.replicas > 1 else []
        words.append(f"b {self.micro_batch}")
        words += [f"recompute {self.recompute}"] if self.recompute != "none" else []
        words += ["SP"] if self.sequence_parallel else []
        words += [self.schedule] if self.schedule != "1F1B" else []
        return ", ".join(words)

    @property
    def shards(self):
        """Ranks over which ZeRO cuts: dp x cp / replicas."""
        return self.dp * self.cp // self.replicas

    @property
    def world(self):
        """All ranks: dp x tp x pp x cp."""
        return self.dp * self.tp * self.pp * self.cp

    def _set(self, name, value):
        object.__setattr__(self, name, value)


FIELDS = tuple(field.name for field in fields(Layout))


def refusal(config, n_gpus, layout, sequence, global_batch):
    """Say which rule a layout breaks for this model, batch and number of GPUs; "" for none."""
    dp, tp, pp, cp, chunks = layout.dp, layout.tp, layout.pp, layout.cp, layout.chunks
    if dp * tp * pp * cp != n_gpus:
        return f"dp x tp x pp x cp must be the {n_gpus} GPUs, got {dp} x {tp} x {pp} x {cp}"
    if config.heads % tp or config.kv_heads % tp or config.ffn % tp or config.vocab % tp:
        cut = ("heads", "kv_heads", "ffn", "vocab")
        name, size = next((n, s) for n in cut if (s := getattr(config, n)) % tp)
        return f"tp must divide {name} = {size}, got {tp}"
    if config.layers % (pp * chunks):
        return f"pp x chunks must divide layers = {config.layers}, got {pp} x {chunks}"
    if cp > 1 and sequence % (2 * cp):
        return (
            f"2 cp must divide the sequence of {sequence} tokens, got cp {cp}: a rank has 2 parts"
        )
    if layout.sequence_parallel and (sequence // cp) % tp:
        return f"tp must divide the {sequence // cp} tokens of a rank to cut them too, got {tp}"
    if config.experts % layout.ep:
        return f"ep must divide experts = {config.experts}, got {layout.ep}"
    if layout.recompute == "per-op" and config.experts > 1:
        return "recompute must not be per-op with experts: their products have no order"
    if global_batch < dp:
        return f"dp must be at most the global batch of {global_batch} sequences, got {dp}"
    if global_batch % (dp * layout.micro_batch):
        return (
            f"dp x micro_batch must divide the global batch of {global_batch} sequences, "
            f"got {dp} x {layout.micro_batch}"
        )
    m = global_batch // (dp * layout.micro_batch)
    if chunks > 1 and m % pp:
        return f"pp must divide the {m} micro-batches to interleave them, got {pp}"
    if layout.schedule == "ZB-H1" and m < pp:
        return f"ZB-H1 must have at least pp = {pp} micro-batches, got {m}"
    return ""
