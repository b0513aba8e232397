"""Real data parallelism in one script: check the averaged gradient, then time an all-reduce.

    torchrun --nproc_per_node=2 -m parlab.distributed.ddp_demo

prints one line, from rank 0. Any number of processes will do; with GPUs it uses nccl and one card
per process, else gloo. See --help. torchrun's notice about OMP_NUM_THREADS and warnings about IPv6
are harmless.
"""

import argparse
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from parlab.collectives.cost import bus_bandwidth
from parlab.distributed import torchrun
from parlab.distributed.measure import sweep
from parlab.units import MB, format_bytes, format_rate, format_seconds

ROWS, FEATURES = 64, 32
TOLERANCE = 1e-6  # float32 sums of 64 terms near 1, in another order


def gradient_error(device):
    """Largest difference between DDP's averaged gradient and that of the full batch, here."""
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)  # the same batch and the same weights on every rank
    X, y = torch.randn(ROWS, FEATURES).to(device), torch.randn(ROWS, 1).to(device)
    model, alone = nn.Linear(FEATURES, 1).to(device), nn.Linear(FEATURES, 1).to(device)
    alone.load_state_dict(model.state_dict())
    ddp = DistributedDataParallel(model)

    mine = slice(rank * ROWS // world, (rank + 1) * ROWS // world)
    squares = (ddp(X[mine]) - y[mine]) ** 2
    # DDP averages over ranks, which may have different numbers of rows: sum here, and divide by the
    # rows that all of them have, on average.
    (squares.sum() * world / ROWS).backward()

    ((alone(X) - y) ** 2).mean().backward()
    pairs = zip(model.parameters(), alone.parameters(), strict=True)
    return max((ours.grad - full.grad).abs().max().item() for ours, full in pairs)


def main(argv=None):
    """The program behind ``python -m parlab.distributed.ddp_demo``; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="parlab.distributed.ddp_demo",
        description="Check DDP's gradient against the full batch and time an all-reduce.",
    )
    parser.add_argument("--mb", type=float, default=100, help="size to time, 10^6 bytes")
    parser.add_argument("--backend", choices=("gloo", "nccl"), help="default: nccl if usable")
    options = parser.parse_args(argv)
    if not 4e-6 <= options.mb < float("inf"):
        parser.error(f"--mb must be a number of at least 4e-6, one float32, got {options.mb}")
    if torchrun.is_missing("torchrun --nproc_per_node=2 -m parlab.distributed.ddp_demo"):
        return 2
    with torchrun.joined_ranks(options.backend) as (backend, device):
        worst = torch.tensor(gradient_error(device), device=device)
        dist.all_reduce(worst, op=dist.ReduceOp.MAX)
        (timing,) = sweep([options.mb * MB], at_least=5, device=device)
        n, rank = dist.get_world_size(), dist.get_rank()
    match = worst.item() <= TOLERANCE  # NaN is no match
    seconds = timing.median("all_reduce")
    bus = bus_bandwidth("all_reduce", n, timing.tensor_bytes, seconds)
    if rank == 0:
        print(
            f"{n} x {backend}: gradients {'match' if match else 'DIFFER from'} the full batch; "
            f"all-reduce of {format_bytes(timing.tensor_bytes)} takes {format_seconds(seconds)}, "
            f"bus bandwidth {format_rate(bus)}"
        )
    return 0 if match and timing.equal else 1


if __name__ == "__main__":
    sys.exit(main())
