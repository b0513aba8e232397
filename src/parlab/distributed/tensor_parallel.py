"""Tensor parallelism between real processes: against the unsharded layer, and counted.

`check_mlp`, `check_block`, `count_block` and `dtensor_block_counts` run on every rank, through
`run_ranks`; `fake_full_size` runs in one ordinary process. What they check is in `sharding`.
"""

import copy
from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from parlab.distributed import compat
from parlab.distributed.agreement import (
    block_config,
    differences,
    gradients,
    my_positions,
    random_input,
    random_weights,
)
from parlab.distributed.counting import CollectiveCounter
from parlab.distributed.gpt import MLP, Block
from parlab.distributed.sharding import (
    ParallelBlock,
    f,
    require_shares,
    shard_layers,
    sum_partial_gradients,
)
from parlab.units import require_int


def check_mlp(hidden=16, ffn=64, rows=8, sequence=1, seed=0):
    """Compare a Megatron MLP cut over the ranks with the whole one, in float64.

    y = g(sum over ranks of GeLU(f(x) A_r + a_r) B_r) + b: A and a by columns, B by rows, b once.

    Returns the largest absolute difference of the output, of the gradient of x and of this rank's
    share of every parameter's gradient, as {"output": .., "x": .., "up.weight": .., ..}; all stay
    below `agreement.TOLERANCE`.

    Raises ValueError where the ranks cannot share ffn.

    >>> from parlab.distributed.launch import run_ranks
    >>> found = run_ranks(check_mlp, 2)
    >>> max(max(rank.values()) for rank in found) < 1e-11
    True
    """
    mlp = random_weights(MLP(block_config(hidden, 1, None, ffn, sequence)), seed)
    x, direction = random_input(rows, sequence, hidden, seed)
    share = shard_layers(mlp)
    whole = gradients(mlp, mlp, x, direction)
    ours = gradients(share, lambda x: share(f(x)), x, direction)
    return differences(whole, ours)


def check_block(
    hidden=16,
    heads=4,
    kv_heads=None,
    ffn=None,
    rows=2,
    sequence=8,
    sequence_parallel=False,
    seed=0,
    sum_partial=True,
):
    """Compare a transformer block cut over the ranks with the whole one, as `check_mlp` does.

    Sizes are those of `gpt.GPTConfig`. With `sequence_parallel`, output and x are compared at this
    rank's positions, and gradients that every rank has of its own positions only (norms, biases of
    o and down) are summed first: `sum_partial=False` leaves that out, to show which are then wrong.

    Raises ValueError where the ranks cannot share heads, kv_heads, ffn or the sequence.
    """
    block = random_weights(Block(block_config(hidden, heads, kv_heads, ffn, sequence)), seed)
    x, direction = random_input(rows, sequence, hidden, seed)
    share = ParallelBlock(block, sequence_parallel)
    whole = gradients(block, block, x, direction)
    if sequence_parallel:
        x, direction = my_positions(x), my_positions(direction)
        whole["output"], whole["x"] = my_positions(whole["output"]), my_positions(whole["x"])
    ours = gradients(share, share, x, direction, sum_partial=sequence_parallel and sum_partial)
    return differences(whole, ours)


def count_block(
    hidden=16,
    heads=4,
    kv_heads=None,
    ffn=None,
    rows=2,
    sequence=8,
    sequence_parallel=False,
    dtype=torch.float32,
):
    """Count what one block calls in forward and backward; returns this rank's CollectiveCounter.

    With `sequence_parallel`, the sum of partial gradients has the phase "after backward". Ours
    keeps the gathered input of q, k, v and up for backward; Megatron keeps this rank's positions
    and gathers them once more in backward, two all-gathers that are not counted here.

    >>> from parlab.distributed.launch import run_ranks
    >>> run_ranks(count_block, 2)[0].summary()
    {('forward', 'all_reduce'): 2, ('backward', 'all_reduce'): 2}
    """
    block = Block(block_config(hidden, heads, kv_heads, ffn, sequence)).to(dtype)
    share = ParallelBlock(block, sequence_parallel)
    x = torch.ones(rows, sequence, hidden, dtype=dtype)
    x = (my_positions(x) if sequence_parallel else x).requires_grad_()
    with CollectiveCounter() as counter:
        share(x).sum().backward()
        if sequence_parallel:
            with counter.named_phase("after backward"):
                sum_partial_gradients(share)
    return counter


def dtensor_block_counts(hidden=16, heads=4, kv_heads=None, ffn=None, rows=2, sequence=8, seed=0):
    """Run one block, in float64, under PyTorch's own plan beside ours; count and compare.

    Returns {plan: (CollectiveCounter, largest difference from the unsharded block)}:

    "ours" : `ParallelBlock`.
    "torch" : ColwiseParallel for q, k, v and up, RowwiseParallel for o and down. Each of q, k and v
        makes a DTensor of the same input, so each all-reduces its own gradient of it in backward.
    "torch, prepared input" : PrepareModuleInput makes that DTensor once, for all of attention.

    >>> from parlab.distributed.launch import run_ranks
    >>> counted = run_ranks(dtensor_block_counts, 2)[0]
    >>> {plan: counter.count("all_reduce", "backward") for plan, (counter, _) in counted.items()}
    {'ours': 2, 'torch': 4, 'torch, prepared input': 2}
    """
    block = random_weights(Block(block_config(hidden, heads, kv_heads, ffn, sequence)), seed)
    x, direction = random_input(rows, sequence, hidden, seed)
    shares = {
        "ours": ParallelBlock(block),
        "torch": parallelize(copy.deepcopy(block), prepare_input=False),
        "torch, prepared input": parallelize(copy.deepcopy(block), prepare_input=True),
    }
    whole = gradients(block, block, x, direction)
    counted = {}
    for plan, share in shares.items():
        with CollectiveCounter() as counter:
            ours = gradients(share, share, x, direction)
        counted[plan] = counter, max(differences(whole, ours).values())
    return counted


def parallelize(block, prepare_input):
    """Cut a `gpt.Block` over all ranks, in place, by torch's own tensor parallelism."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        parallelize_module,
    )

    plan = {f"attention.{name}": ColwiseParallel() for name in ("q", "k", "v")}
    plan |= {"attention.o": RowwiseParallel()}
    plan |= {"mlp.up": ColwiseParallel(), "mlp.down": RowwiseParallel()}
    if prepare_input:
        plan["attention"] = PrepareModuleInput(
            input_layouts=Replicate(), desired_input_layouts=Replicate()
        )
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return parallelize_module(block, mesh, plan)


def fake_full_size(
    hidden=4096,
    sequence=4096,
    batch=1,
    tp=8,
    heads=32,
    kv_heads=None,
    sequence_parallel=False,
    dtype=torch.bfloat16,
):
    """Count one block at full size, in this process alone, with tensors that have no data.

    Returns {recompute: CollectiveCounter} for "none", "full" (the whole block runs again in
    backward, as in Megatron) and "early stop" (torch's default, which ends the second forward as
    soon as backward has what it needs, and so spares the last collective).

    >>> none = fake_full_size()["none"]
    >>> none.count("all_reduce"), none.calls[0].bytes, none.ring_bytes()
    (4, 33554432, 234881024)

    Raises RuntimeError inside `run_ranks` or wherever a process group exists.
    """
    require_int("batch", batch, minimum=1)
    require_int("tp", tp, minimum=1)
    config = block_config(hidden, heads, kv_heads, None, sequence)
    positions = sequence // tp if sequence_parallel else sequence
    if sequence_parallel:
        require_shares("sequence", sequence, tp, "a rank keeps s / N positions")
    counters = {}
    # Built in its dtype, since a fake parameter cannot change its own.
    with compat.fake_process_group(tp), compat.fake_tensors(), _default_dtype(dtype):
        share = ParallelBlock(Block(config), sequence_parallel)
        for recompute, early_stop in (("none", None), ("full", False), ("early stop", True)):
            x = torch.empty(batch, positions, hidden, dtype=dtype, requires_grad=True)
            with CollectiveCounter() as counter:
                run = share
                if recompute != "none":
                    again = {"use_reentrant": False, "context_fn": counter.recomputing}
                    run = partial(checkpoint, share, **again)
                with set_checkpoint_early_stop(bool(early_stop)):
                    run(x).sum().backward()
            counters[recompute] = counter
    return counters


@contextmanager
def _default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
