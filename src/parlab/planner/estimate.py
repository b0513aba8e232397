"""Memory and time of one iteration of a layout, item by item."""

from functools import lru_cache, partial
from typing import NamedTuple

from parlab.hardware import Cluster
from parlab.memory.layer import ask, maker
from parlab.memory.moments import TrainingMemory
from parlab.memory.rank import rank_params
from parlab.memory.states import BYTE_RECIPES
from parlab.memory.step import CUDA_CONTEXT_BYTES, training_memory
from parlab.models import ModelConfig
from parlab.planner.efficiencies import FITTED, Efficiencies
from parlab.planner.layer import card_of
from parlab.planner.layout import Layout, refusal
from parlab.planner.simulated import simulated_seconds
from parlab.planner.step import Job, StepTime, block, step_time
from parlab.units import require_bool, require_choice, require_int, require_number

MOST_TOKENS = 10**9


class TimeItem(NamedTuple):
    """Something that an iteration spends time on."""

    name: str
    seconds: float


class Estimate(NamedTuple):
    """An iteration of a layout: what its fullest rank holds, and what it takes."""

    job: Job
    layout: Layout
    memory: TrainingMemory
    step: StepTime

    @property
    def peak_bytes(self):
        """Of the fullest rank."""
        return self.memory.peak

    @property
    def usable_bytes(self):
        """What the card has for it."""
        return self.job.cluster.gpu.usable_bytes

    @property
    def fits(self):
        """Whether the peak is within the usable bytes."""
        return self.memory.peak <= self.job.cluster.gpu.usable_bytes

    @property
    def times(self):
        """TimeItems that sum to `seconds`, without those that take none."""
        names = (name.replace("_", " ") for name in StepTime._fields)
        return tuple(TimeItem(*pair) for pair in zip(names, self.step, strict=True) if pair[1])

    @property
    def seconds(self):
        """Of one iteration."""
        return sum(self.step)

    @property
    def simulated_seconds(self):
        """Seconds of one iteration with the pipeline simulated, stage by stage, not by a formula.

        Equal to `seconds` but for ZB-H1, whose formula knows no slow last stage, and for transfers:
        here a rank may work during them, there it waits for each.
        """
        return simulated_seconds(self.job, self.layout, self.step)

    @property
    def tokens_per_second_per_gpu(self):
        """Tokens of the global batch over seconds and GPUs."""
        tokens = self.job.global_batch * self.job.sequence
        return tokens / self.seconds / self.layout.world

    @property
    def mfu(self):
        """Model FLOP utilisation: what the model needs over the dense peak, all scores counted."""
        return self._utilisation(self._flops.training)

    @property
    def hfu(self):
        """Hardware FLOP utilisation: with the products that recomputation repeats."""
        flops, recompute = self._flops, self.layout.recompute
        again = {
            "full": flops.forward - flops.head,
            "selective": flops.scores,
            "per-op": (flops.attention + flops.mlp) / 2,
        }.get(recompute, 0)
        return self._utilisation(flops.training + again)

    def usd_per_billion_tokens(self, usd_per_gpu_hour):
        """Dollars for 10^9 tokens at a price of a GPU for an hour.

        >>> from parlab.hardware import cluster
        >>> from parlab.models import model
        >>> made = estimate(model("llama-3-8b"), cluster("hgx-h100"), Layout(dp=8, zero=3), 8192, 8)
        >>> round(made.usd_per_billion_tokens(2.5))
        92
        """
        price = require_number("usd_per_gpu_hour", usd_per_gpu_hour, minimum=0)
        return price / 3600 * 1e9 / self.tokens_per_second_per_gpu

    @property
    def _flops(self):
        return self.job.config.flops_per_token(self.job.sequence)

    def _utilisation(self, flop):
        card = self.job.cluster.gpu
        peak = card.bf16_flop_per_s or card.fp16_flop_per_s
        return flop * self.tokens_per_second_per_gpu / peak


_make_estimate = maker(Estimate)
# Arguments of training_memory that are not among the memory_options.
DECIDED = {
    *("sequence", "n_gpus", "stage", "recipe", "tp", "sequence_parallel", "pipeline", "chunks"),
    *("context_parallel", "expert_parallel", "recompute", "flash", "dropout", "keep_gradients"),
}


def estimate(
    config,
    cluster,
    layout,
    sequence,
    global_batch,
    *,
    recipe="mixed-precision",
    flash=True,
    dropout=False,
    fused=True,
    overlap=True,
    efficiencies=FITTED,
    **memory_options,
):
    """Estimate memory and time of one iteration, item by item.

    Memory is `training_memory` of the fullest pipeline rank with PyTorch's CUDA context, and for
    context parallelism the keys and values under way. Time is counted work over what eight fitted
    efficiencies leave of the data sheet: see `parlab.planner.layer` and `step` for each formula,
    and `parlab.accuracy` for the errors. Not in it: waiting for data, checkpoints, stragglers,
    failures, clocks that fall at a power limit, other jobs' traffic.

    config: a ModelConfig. cluster: a Cluster of layout.world GPUs. layout: a Layout. sequence: s,
        tokens. global_batch: sequences of an iteration, over all ranks.
    recipe: a name in BYTE_RECIPES; its bytes of a gradient are also those that are reduced.
    flash, dropout: as in `training_memory`. fused: kernels as Megatron or torch.compile fuse them;
        False: eager PyTorch. overlap: gradients (and ZeRO's weights) travel beside compute.
    memory_options: other arguments of `training_memory`, such as `loss` or `reserved`.

    Raises ValueError or TypeError for a layout that the model, the batch or the cluster forbids.

    >>> from parlab.hardware import cluster
    >>> from parlab.models import model
    >>> made = estimate(model("llama-3-8b"), cluster("hgx-h100"), Layout(dp=8, zero=3), 8192, 8)
    >>> round(made.peak_bytes / 1e9, 1), made.fits, round(made.tokens_per_second_per_gpu, -2)
    (75.4, True, 7500.0)
    """
    job = ask(
        make_job,
        (config, cluster, sequence, global_batch, recipe)
        + (flash, dropout, fused, overlap, efficiencies),
    )
    if type(layout) is not Layout:
        raise TypeError(f"layout must be a Layout, got {layout!r:.60}")
    reason = refusal(config, cluster.n_gpus, layout, job.sequence, job.global_batch)
    if reason:
        raise ValueError(f"layout: {reason}")
    return estimate_layout(job, layout, recipe, memory_options)


def estimate_layout(job, layout, recipe, memory_options):
    """Estimate a layout that no rule refuses."""
    a, config = layout, job.config
    made = block(job, a.tp, a.cp, a.ep, a.micro_batch, a.recompute, a.sequence_parallel)
    part = rank_params(config, a.tp, a.pp, a.pp - 1, a.ep)
    step = step_time(job, layout, made, part)
    memory = layout_memory(job, layout, recipe, memory_options)
    return _make_estimate((job, layout, memory, step))


def layout_memory(job, layout, recipe, memory_options):
    """Return the TrainingMemory of the fullest rank of a layout."""
    a, memory = layout, training_memory
    if memory_options:
        if taken := DECIDED.intersection(memory_options):
            raise TypeError(f"{min(taken)} must not be given: the job or its layout decides it")
        memory = partial(training_memory, **memory_options)
    return memory(
        job.config,
        a.micro_batch,
        sequence=job.sequence // a.cp,
        n_gpus=a.dp * a.cp // a.replicas,
        stage=a.zero,
        recipe=recipe,
        tp=a.tp,
        sequence_parallel=a.sequence_parallel,
        pipeline=a.pp,
        chunks=a.chunks,
        context_parallel=a.cp,
        expert_parallel=a.ep,
        recompute=a.recompute,
        flash=job.flash,
        dropout=job.dropout,
        keep_gradients=job.global_batch > a.dp * a.micro_batch,
        context_bytes=memory_options.get("context_bytes", CUDA_CONTEXT_BYTES),
    )


@lru_cache(maxsize=64, typed=True)
def make_job(
    config, cluster, sequence, global_batch, recipe, flash, dropout, fused, overlap, efficiencies
):
    """Check what a layout is estimated for; return it as a Job."""
    if not isinstance(config, ModelConfig):
        raise TypeError(f"config must be a ModelConfig, got {config!r:.60}")
    if not isinstance(cluster, Cluster):
        raise TypeError(f"cluster must be a Cluster, got {cluster!r:.60}")
    if not isinstance(efficiencies, Efficiencies):
        raise TypeError(f"efficiencies must be Efficiencies, got {efficiencies!r:.60}")
    longest = config.positions or MOST_TOKENS
    sequence = require_int("sequence", sequence, minimum=1, maximum=longest)
    global_batch = require_int("global_batch", global_batch, minimum=1, maximum=MOST_TOKENS)
    require_bool("flash", flash)
    require_bool("dropout", dropout)
    require_bool("fused", fused)
    require_bool("overlap", overlap)
    each = BYTE_RECIPES[require_choice("recipe", recipe, BYTE_RECIPES)].of_each
    return Job(
        config,
        cluster,
        sequence,
        global_batch,
        efficiencies,
        card_of(cluster.gpu, efficiencies),
        each,
        flash,
        dropout,
        fused,
        overlap,
    )
