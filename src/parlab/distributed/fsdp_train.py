"""Train a small GPT in shards, by hand and by PyTorch's `fully_shard`, and count what is sent.

All functions but `train("serial")` are called by every rank alike, inside `run_ranks`. Weights and
messages are on the CPU. `fsdp_facts` has single experiments, `fsdp_watch` the memory of a step.
"""

from contextlib import nullcontext

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from parlab.distributed import compat
from parlab.distributed.counting import CollectiveCounter
from parlab.distributed.data_parallel import Training
from parlab.distributed.fsdp import FullySharded, gather, shard_by_hand
from parlab.distributed.gpt import GPT, TINY, token_batch, token_loss
from parlab.units import require_choice, require_int

LEARNING_RATE = 1e-3


def shard_by_torch(
    model,
    reshard_after_forward=None,
    *,
    replicas=1,
    param_dtype=None,
    reduce_dtype=None,
    offload=False,
    divide_factor=None,
):
    """Apply `fully_shard` to each of the model's `blocks` and then to the model, in place.

    Parameters
    ----------
    reshard_after_forward : True or False for all units; None is torch's default, True for blocks
        and False for the root: backward begins with the weights that forward used last.
    replicas : R groups of N / R ranks; each group holds the model once, in shards (HSDP).
    param_dtype, reduce_dtype : of gathered weights and computing, and of gradients while they are
        reduced; None leaves the model's.
    offload : keep shards, gradients and optimizer on the CPU (`CPUOffloadPolicy`), where a run
        without GPUs has them anyway.
    divide_factor : what the sum of the ranks' gradients is divided by; None is N.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import (
        CPUOffloadPolicy,
        FSDPModule,
        MixedPrecisionPolicy,
        OffloadPolicy,
        fully_shard,
    )

    n = dist.get_world_size()
    if n % require_int("replicas", replicas, minimum=1):
        raise ValueError(f"replicas must divide the {n} ranks, got {replicas}: groups are equal")
    shape, names = (n,), ("shards",)
    if replicas > 1:
        shape, names = (replicas, n // replicas), ("replicas", "shards")
    options = {
        "mesh": init_device_mesh("cpu", shape, mesh_dim_names=names),
        "reshard_after_forward": reshard_after_forward,
        "mp_policy": MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype),
        "offload_policy": CPUOffloadPolicy(pin_memory=False) if offload else OffloadPolicy(),
    }
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)
    if divide_factor is not None:
        for unit in (module for module in model.modules() if isinstance(module, FSDPModule)):
            unit.set_gradient_divide_factor(divide_factor)
            unit.set_force_sum_reduction_for_comms(True)  # gloo cannot scale while it sums
    return model


SHARDERS = {"hand": shard_by_hand, "torch": shard_by_torch}
WRAPPERS = {"ddp": DistributedDataParallel, **SHARDERS}
# When gradients leave the rank; see `count_step`.
REDUCE = {
    "ddp": ("every", "last"),
    "hand": ("every",),
    "torch": ("every", "last", "all-reduce last"),
}


def train(
    by="torch",
    rows=8,
    steps=3,
    *,
    micro_batches=1,
    reduce="every",
    config=TINY,
    dtype="float64",
    seed=0,
    **options,
):
    """Train a small GPT with AdamW on one global batch; every sharded run must equal the serial.

    Returns a `data_parallel.Training`, in which weights and gradients are whole, gathered from all
    ranks, so that two runs compare in one line.

    Parameters
    ----------
    by : "hand" or "torch" shards the model; "serial" trains on the whole batch in this process.
    rows : sequences in the global batch: each rank takes rows / N, in micro-batches of
        rows / (N m), which must be whole numbers.
    steps : steps of AdamW.
    micro_batches, reduce : m, and when gradients leave the rank, as in `count_step`.
    dtype : "float64" or "float32".
    options : those of `shard_by_hand` or `shard_by_torch`.

    >>> from parlab.distributed.launch import run_ranks
    >>> hand, serial = run_ranks(train, 2, args=("hand", 4))[0], train("serial", 4)
    >>> np.allclose(hand.gradients, serial.gradients, rtol=0, atol=1e-15)
    True
    """
    by = require_choice("by", by, ("serial", *SHARDERS))
    require_int("steps", steps, minimum=1)
    require_int("micro_batches", micro_batches, minimum=1)
    dtype = getattr(torch, require_choice("dtype", dtype, ("float64", "float32")))
    tokens, targets = token_batch(config, require_int("rows", rows, minimum=1), seed)
    model = GPT(config, seed).to(dtype)
    names = [name for name, _ in model.named_parameters()]
    n = 1 if by == "serial" else dist.get_world_size()
    if rows % (n * micro_batches):
        raise ValueError(
            f"rows must be a multiple of {n} ranks x {micro_batches} micro-batches, got {rows}: "
            "the mean of their means is the mean over all rows only if they are equal"
        )
    if by != "serial":
        tokens, targets = (batch.chunk(n)[dist.get_rank()] for batch in (tokens, targets))
        model = SHARDERS[by](model, **options)

    def whole(gradients=False):
        by_name = whole_weights(model, gradients)
        return torch.cat([by_name[name].detach().flatten() for name in names]).numpy().copy()

    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    before, losses, gradients = whole(), [], []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = _backward_passes(model, tokens, targets, micro_batches, by, reduce)
        if by != "serial":
            dist.all_reduce(loss, op=dist.ReduceOp.AVG)
        losses.append(loss.item())
        gradients.append(whole(gradients=True))
        optimizer.step()
    return Training(tuple(losses), np.stack(gradients), before, whole())


def whole_weights(model, gradients=False):
    """All weights of a model, or their gradients, by name; shards are gathered, on every rank."""
    if isinstance(model, FullySharded):
        units = {"": model} | {f"blocks.{i}.": unit for i, unit in enumerate(model.module.blocks)}
        found = {}
        for prefix, unit in units.items():
            whole = gather(unit.shard.grad if gradients else unit.shard)
            found |= {prefix + name: weight for name, weight in unit.weights_in(whole).items()}
        return found
    tensors = {name: p.grad if gradients else p for name, p in model.named_parameters()}
    return {name: compat.whole_tensor(tensor) for name, tensor in tensors.items()}


def count_step(
    by="torch", micro_batches=1, *, reduce="every", config=TINY, dtype=torch.float32, **options
):
    """Count what one optimizer step calls on this rank; returns the `CollectiveCounter`.

    Parameters
    ----------
    by : "ddp", "hand" or "torch".
    micro_batches : m, forward and backward passes before the step, each over one sequence.
    reduce : when gradients leave the rank. At "every" micro-batch; at the "last" one, under DDP's
        `no_sync` or FSDP2's `set_requires_gradient_sync(False)`; or, for replicas, "all-reduce
        last": scattered every time, averaged over replicas once (`set_requires_all_reduce`).
    config, dtype : the model, and the dtype of its weights.
    options : those of `shard_by_hand` or `shard_by_torch`.

    >>> from parlab.distributed.launch import run_ranks
    >>> fsdp, ddp = (run_ranks(count_step, 2, args=(by,))[0] for by in ("hand", "ddp"))
    >>> fsdp.summary()  # two blocks and the root, which stays gathered
    {('forward', 'all_gather'): 3, ('backward', 'all_gather'): 2, ('backward', 'reduce_scatter'): 3}
    >>> round(fsdp.ring_bytes() / ddp.ring_bytes(), 3)
    1.453
    """
    by = require_choice("by", by, WRAPPERS)
    require_int("micro_batches", micro_batches, minimum=1)
    model = WRAPPERS[by](GPT(config).to(dtype), **options)
    tokens, targets = token_batch(config, micro_batches, seed=dist.get_rank())
    for _ in range(2):  # DDP regroups its buckets after the first, and tells all ranks
        _backward_passes(model, tokens[:1], targets[:1], 1, by, "every")
    with CollectiveCounter() as counter:
        _backward_passes(model, tokens, targets, micro_batches, by, reduce)
    return counter


def _backward_passes(model, tokens, targets, micro_batches, by, reduce):
    """Forward and backward over equal micro-batches; returns the mean loss."""
    if by != "serial":
        reduce = require_choice("reduce", reduce, REDUCE[by])
    total = 0.0
    pairs = zip(tokens.chunk(micro_batches), targets.chunk(micro_batches), strict=True)
    for j, (x, y) in enumerate(pairs):
        now = reduce == "every" or j == micro_batches - 1
        if reduce == "all-reduce last":
            model.set_requires_all_reduce(now)
        elif by == "torch":
            model.set_requires_gradient_sync(now)
        with model.no_sync() if by == "ddp" and not now else nullcontext():
            loss = token_loss(model(x), y) / micro_batches
            loss.backward()
        total += loss.detach()
    return total
