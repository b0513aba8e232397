"""What DistributedDataParallel does beyond averaging, one small experiment each.

All functions but `sampler_rows` are called by every rank alike, inside `run_ranks` or under
torchrun. Models are so small that every number can be checked by hand.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler

from parlab.units import require_choice, require_int


def start_weights():
    """Every rank starts from its own weight; returns (before, after) it is wrapped.

    DDP sends rank 0's parameters to all others when it is made.

    >>> from parlab.distributed.launch import run_ranks
    >>> run_ranks(start_weights, 3)
    [(1.0, 1.0), (2.0, 1.0), (3.0, 1.0)]
    """
    model = _one_weight(dist.get_rank() + 1.0)
    before = model.weight.item()
    DistributedDataParallel(model)
    return before, model.weight.item()


def buffers_at_forward():
    """Every rank writes its own number into a buffer; returns it (before, after) the next forward.

    DDP sends rank 0's buffers, such as the running means of batch norm, to all others at the start
    of every forward pass in training: the other ranks' statistics are lost.

    >>> from parlab.distributed.launch import run_ranks
    >>> run_ranks(buffers_at_forward, 3)
    [(1.0, 1.0), (2.0, 1.0), (3.0, 1.0)]
    """
    model = _one_weight(1.0)
    model.register_buffer("seen", torch.zeros(1))
    ddp = DistributedDataParallel(model)
    model.seen.fill_(dist.get_rank() + 1.0)
    before = model.seen.item()
    ddp(torch.ones(1, 1))
    return before, model.seen.item()


def batch_norm_gap():
    """Largest error of DDP's averaged gradient relative to the full batch's, with batch norm.

    The shards are equal, so that averaging is exact but for batch norm, which normalises by the
    mean and the variance of the rank's own rows. Returns (without batch norm, with it).
    `SyncBatchNorm`, the usual cure, needs GPUs.
    """
    return tuple(_gap_to_full_batch(norm) for norm in (nn.Identity(), nn.BatchNorm1d(4)))


def _gap_to_full_batch(norm, rows_per_rank=8):
    n, rank = dist.get_world_size(), dist.get_rank()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), norm, nn.Tanh(), nn.Linear(4, 1)).double()
    rows = torch.randn(n * rows_per_rank, 4, dtype=torch.float64)
    full = torch.autograd.grad(model(rows).square().mean(), list(model.parameters()))
    mine = rows[rank * rows_per_rank : (rank + 1) * rows_per_rank]
    ddp = DistributedDataParallel(model)  # kept to the end: without it nothing is averaged
    ddp(mine).square().mean().backward()
    pairs = zip(full, model.parameters(), strict=True)
    error = max((parameter.grad - gradient).abs().max() for gradient, parameter in pairs)
    return (error / max(gradient.abs().max() for gradient in full)).item()


def no_sync_gradients(encloses):
    """Gradient of w after one micro-batch with the loss (rank + 1) w under `no_sync`.

    encloses : "forward and backward" keeps the rank's own gradient, as meant. "backward" only is
        without effect: DDP decides in the forward pass whether to average. "nothing" averages.

    >>> from parlab.distributed.launch import run_ranks
    >>> run_ranks(no_sync_gradients, 2, args=("forward and backward",))
    [1.0, 2.0]
    >>> run_ranks(no_sync_gradients, 2, args=("backward",))
    [1.5, 1.5]
    """
    encloses = require_choice("encloses", encloses, ("forward and backward", "backward", "nothing"))
    model = _one_weight(1.0)
    ddp = DistributedDataParallel(model)
    x = torch.full((1, 1), dist.get_rank() + 1.0)
    if encloses == "forward and backward":
        with ddp.no_sync():
            ddp(x).sum().backward()
    elif encloses == "backward":
        loss = ddp(x).sum()
        with ddp.no_sync():
            loss.backward()
    else:
        ddp(x).sum().backward()
    return model.weight.grad.item()


def unused_parameter_error(find_unused_parameters=False):
    """Two steps of a model that leaves a layer out; returns (step that failed, DDP's message).

    The first backward waits for a gradient that never comes, silently; the second forward notices.
    With find_unused_parameters DDP looks for such layers in each forward: (None, "").
    """
    model = nn.ModuleDict({"used": nn.Linear(1, 1), "left_out": nn.Linear(1, 1)})
    model.forward = lambda x: model["used"](x)
    ddp = DistributedDataParallel(model, find_unused_parameters=find_unused_parameters)
    for step in (1, 2):
        try:
            ddp(torch.ones(1, 1)).sum().backward()
        except RuntimeError as error:
            return step, str(error)
    return None, ""


def nan_on_one_rank():
    """Only the last rank's loss is NaN; returns whether this rank's weight is after the step.

    >>> from parlab.distributed.launch import run_ranks
    >>> run_ranks(nan_on_one_rank, 3)
    [True, True, True]
    """
    model = _one_weight(1.0)
    ddp = DistributedDataParallel(model)
    is_last = dist.get_rank() == dist.get_world_size() - 1
    ddp(torch.full((1, 1), float("nan") if is_last else 1.0)).sum().backward()
    with torch.no_grad():
        model.weight -= model.weight.grad
    return bool(model.weight.isnan())


def sampler_rows(n_items, n_ranks, *, drop_last=False):
    """Items that torch's `DistributedSampler` gives each rank, without shuffling.

    It deals them out in turn, and repeats the first ones until all ranks have equally many, or
    drops the last ones.

    >>> sampler_rows(10, 4)
    [[0, 4, 8], [1, 5, 9], [2, 6, 0], [3, 7, 1]]
    >>> sampler_rows(10, 4, drop_last=True)
    [[0, 4], [1, 5], [2, 6], [3, 7]]
    """
    require_int("n_items", n_items, minimum=1)
    require_int("n_ranks", n_ranks, minimum=1)
    return [
        list(
            DistributedSampler(
                range(n_items),
                num_replicas=n_ranks,
                rank=rank,
                shuffle=False,
                drop_last=drop_last,
            )
        )
        for rank in range(n_ranks)
    ]


def _one_weight(value):
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, value)
    return model
