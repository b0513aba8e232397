"""Memory of one rank of many, by PyTorch's own machinery, on a machine without that memory.

A fake process group says that there are 64 ranks; fake tensors have sizes but no data. A training
step of a GPT with 7.5e9 parameters then takes seconds, and torch's memory tracker tells the bytes
of all tensors that this rank would hold. `measure_here` runs the same step on real ranks.

How each stage comes to 2 + 2 + 12 bytes a parameter: the model is built in bfloat16, so weights and
gradients have 2 each, and `zero.MixedPrecisionAdamW` keeps 12.

    0   `zero.Replicated`: everything on every rank, gradients all-reduced after backward
    1   the same around torch's ZeroRedundancyOptimizer, which deals out whole parameters
    2   `zero.Zero`, by hand: gradients reduce-scattered and freed during backward
    3   torch's `fully_shard` on every block, and on what is left: embeddings, last norm, head

Not in it: DDP's buckets, buffers inside collectives, what an allocator rounds up or cannot use.
"""

from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from parlab.distributed import compat
from parlab.distributed.gpt import GPT, GPTConfig, token_loss
from parlab.distributed.zero import MixedPrecisionAdamW, Replicated, Zero
from parlab.memory.activations import activation_memory
from parlab.memory.states import ZeroMemory
from parlab.models import ModelConfig
from parlab.units import require_bool, require_choice, require_int

# The 7.5e9 row of arXiv 2104.04473, table 1, but untied, and V makes Psi 7.5013e9.
GPT_7_5B = ModelConfig(
    layers=36, hidden=4096, heads=32, vocab=29696, positions=2048, tied=False, name="GPT 7.5B"
)
MOST_RANKS = 1024
RECIPES = {"mixed-precision": torch.bfloat16, "autocast": torch.float32}  # dtype of the weights
MOMENTS = ("after the step", "loss", "forward", "backward", "optimizer")
KINDS = {  # of torch's two trackers, and our word
    "Parameter": "weights",
    "Sharded Param": "weights",
    "Gradient": "gradients",
    "Sharded Grad": "gradients",
    "Optstate": "optimizer",
    "OptState": "optimizer",
    "Activation": "activations",
    "Temp": "temporaries",
    "Unsharded Param": "gathered weights",
    "Unsharded Grad": "whole gradients",
    "All Gather": "all-gather buffers",
    "Reduce Scatter": "reduce-scatter buffers",
    "Inputs": "tokens",
    "Other": "tokens",
}


@dataclass(frozen=True)
class Measured:
    """What torch's tracker saw on one rank in one training step.

    moments: {kind: bytes} for each of `MOMENTS`: when the step is over (gradients not freed yet),
        when forward has ended with the loss, and at the fullest moment of each phase.
    """

    stage: int
    n_ranks: int
    rank: int
    config: ModelConfig
    moments: dict[str, dict[str, int]]

    @property
    def after_step(self):
        """Weights, gradients and optimizer when the step is over, as `zero_memory` has them."""
        kinds = self.moments["after the step"]
        return ZeroMemory(kinds["weights"], kinds["gradients"], kinds["optimizer"])

    def at(self, moment):
        """Bytes of all kinds at one of `MOMENTS`."""
        return sum(self.moments[require_choice("moment", moment, MOMENTS)].values())

    @property
    def peak_moment(self):
        """The fullest of `MOMENTS`."""
        return max(MOMENTS, key=self.at)

    @property
    def peak(self):
        """Bytes at the fullest moment."""
        return self.at(self.peak_moment)


def measure(
    stage,
    n_ranks=64,
    rank=0,
    *,
    config=GPT_7_5B,
    micro_batch=1,
    recipe="mixed-precision",
    recompute="none",
    reshard_after_forward=True,
    progress=None,
):
    """Run one training step of a GPT as one of n fake ranks; return its bytes as `Measured`.

    Parameters
    ----------
    stage : 0 to 3.
    n_ranks, rank : number of ranks, and which of them this one is.
    config : a ModelConfig of GPT-2's kind; the sequence is its `positions`.
    micro_batch : b, sequences; there is one micro-batch.
    recipe : "mixed-precision", 2 + 2 + 12; at stage 3 also "autocast", 4 + 4 + 8: fp32 shards,
        which FSDP's MixedPrecisionPolicy gathers in bfloat16.
    recompute : "none", "selective" or "full", as in `gpt.GPTConfig`.
    reshard_after_forward : at stage 3; False keeps gathered weights from forward to backward.
    progress : called with a line of text at the start of each phase, such as `print`.

    Raises RuntimeError inside `run_ranks` or wherever a process group exists, ValueError or
    TypeError for a parameter that cannot be used. It leaves no process group behind.

    >>> small = ModelConfig(layers=2, hidden=64, heads=4, vocab=128, positions=32)
    >>> measured = measure(3, 8, config=small)
    >>> measured.after_step.total / small.n_params  # 16 / N
    2.0
    >>> measured.peak_moment
    'backward'
    """
    n_ranks = require_int("n_ranks", n_ranks, minimum=1, maximum=MOST_RANKS)
    last = n_ranks - 1
    rank = require_int("rank", rank, minimum=0, maximum=last, why="ranks count from 0")
    options = (config, micro_batch, recipe, recompute, reshard_after_forward, progress)
    with compat.fake_process_group(n_ranks, rank):
        mesh = _mesh()  # it computes with numbers, so before tensors have none
        with compat.fake_tensors(beside_real_ones=True), compat.ChunksOnce():
            return _run(mesh, stage, *options)


def measure_here(
    stage,
    *,
    config,
    micro_batch=1,
    recipe="mixed-precision",
    recompute="none",
    reshard_after_forward=True,
):
    """Run the same step with data, as this rank of the real process group; for small models.

    The parameters are those of `measure`, and so are the bytes.
    """
    return _run(_mesh(), stage, config, micro_batch, recipe, recompute, reshard_after_forward, None)


def stage_3_peak(config, n_ranks, micro_batch=1):
    """{kind: bytes} at the fullest moment of stage 3, by formula; N divides every first dim.

    Backward has reached the last block but one and has the gradients of its MLP. A block is whole
    three times: its gathered weights, the gathering of the one before, ahead of its turn, and the
    gradients of the one behind, which are being reduce-scattered. Whole are also the weights of
    embeddings and head since forward began, and the head's gradient until backward ends. (With many
    sequences the loss, which holds logits in fp32 twice, may be fuller.)

    >>> items = stage_3_peak(GPT_7_5B, 64)
    >>> items["gathered weights"] / 1e9, round(sum(items.values()) / 1e9, 3)
    (0.906092544, 13.242)
    """
    h, f, psi, block = config.hidden, config.ffn, config.n_params, config.layer_params
    tokens = micro_batch * config.positions
    kept = activation_memory(
        config, micro_batch, sequence=config.positions, dropout=False, flash=True
    )
    statistics = 2 * 2 * 2 * tokens  # of two norms, the mean and the deviation of each token
    used_up = 2 * 2 * tokens * f  # what the MLP kept before and after GeLU
    head = config.vocab * h + 2 * h  # with the last norm
    mlp = 2 * h * f + f + h
    return {
        "weights": 2 * psi // n_ranks,
        "gradients": 2 * block // n_ranks,
        "optimizer": 12 * psi // n_ranks,
        "activations": (config.layers - 1) * (kept.layer_bytes + statistics) - used_up,
        "temporaries": 2 * (head + mlp) + 2 * tokens * (f + 2 * h),  # and of activations
        "gathered weights": 2 * (psi - config.layers * block) + 2 * block,
        "all-gather buffers": 2 * block,
        "reduce-scatter buffers": 2 * block,
    }


def _run(mesh, stage, config, micro_batch, recipe, recompute, reshard_after_forward, progress):
    stage = require_int("stage", stage, minimum=0, maximum=3)
    b = require_int("micro_batch", micro_batch, minimum=1)
    require_bool("reshard_after_forward", reshard_after_forward)
    recipe = require_choice("recipe", recipe, RECIPES)
    if recipe == "autocast" and stage < 3:
        raise ValueError(f"recipe 'autocast' needs stage 3, got {stage}: it is FSDP that casts")
    gpt = _gpt_config(config, recompute)
    n, rank = dist.get_world_size(), dist.get_rank()

    def say(phase):
        if progress is not None:
            progress(f"stage {stage}, rank {rank} of {n}: {phase}")

    say(f"{config.n_params:,} parameters")
    with _default_dtype(RECIPES[recipe]):  # a fake parameter cannot change its dtype later
        model = GPT(gpt)
    if stage == 3:
        _shard(model, mesh, reshard_after_forward)
    parallel, optimizer = _parallelise(stage, list(model.parameters()))
    tokens, targets = torch.zeros(2, b, gpt.sequence, dtype=torch.int64)
    tracker = compat.memory_tracker(model, optimizer, (tokens, targets))
    if stage == 2:
        _track_shards(tracker, parallel)
    seen = {}
    with tracker:
        say("forward")
        loss = token_loss(model(tokens), targets)
        seen["forward"], seen["loss"] = _kinds(tracker, "peak"), _kinds(tracker)
        compat.forget_peak(tracker)
        say("backward")
        loss.backward()
        seen["backward"] = _kinds(tracker, "peak")
        compat.forget_peak(tracker)
        say("optimizer")
        parallel.step()
        seen["optimizer"], seen["after the step"] = _kinds(tracker, "peak"), _kinds(tracker)
    return Measured(stage, n, rank, config, {moment: seen[moment] for moment in MOMENTS})


def _parallelise(stage, weights):
    """Return what makes the step, and the optimizer that has this rank's states."""
    make_optimizer = MixedPrecisionAdamW
    if stage == 3:
        optimizer = make_optimizer(weights)  # FSDP averages gradients by itself
        return optimizer, optimizer
    if stage == 2:
        parallel = Zero(weights, make_optimizer, stage=2)
        return parallel, parallel.optimizer
    if stage == 1:
        from torch.distributed.optim import ZeroRedundancyOptimizer  # which loads a compiler

        sharing = partial(ZeroRedundancyOptimizer, optimizer_class=make_optimizer)
        parallel = Replicated(weights, sharing)
        return parallel, parallel.optimizer.optim
    parallel = Replicated(weights, make_optimizer)
    return parallel, parallel.optimizer


def _shard(model, mesh, reshard_after_forward):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    # None: all units but the outermost, whose weights backward needs first.
    reshard = None if reshard_after_forward else False
    units = (*model.blocks, model)
    for unit in units:
        fully_shard(unit, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    for unit in units:  # the first gathering of all copies padded shards, if they are fake
        unit.unshard()
        unit.reshard()


def _track_shards(tracker, zero):
    """Without it the tracker would take the gradients of shards for temporaries."""
    for weight, shard in zero.shards.items():
        track = partial(tracker.track_external, nn.ParameterList([shard]))
        weight.register_post_accumulate_grad_hook(lambda _, track=track: track())


def _kinds(tracker, moment="current"):
    """{kind: bytes} in our words: the three model states, and what else there is."""
    seen = dict.fromkeys(("weights", "gradients", "optimizer"), 0)
    for theirs, size in compat.tracked_bytes(tracker, moment).items():
        if size:
            seen[KINDS[theirs]] = seen.get(KINDS[theirs], 0) + size
    return seen


def _mesh():
    return init_device_mesh("cpu", (dist.get_world_size(),))


def _gpt_config(config, recompute):
    if not isinstance(config, ModelConfig):
        raise TypeError(f"config must be a ModelConfig, got {type(config).__name__}")
    same = ("vocab", "layers", "hidden", "heads", "kv_heads", "ffn", "tied")
    sizes = {name: getattr(config, name) for name in same}
    gpt = GPTConfig(sequence=config.positions or 1, recompute=recompute, **sizes)
    if gpt.n_params != config.n_params:
        raise ValueError(
            "config must be of GPT-2's kind (learned positions, LayerNorm, GeLU, all biases, no "
            f"experts), got {config}"
        )
    return gpt


@contextmanager
def _default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
