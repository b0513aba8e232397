"""The program behind ``python -m parlab.distributed.ring``: the hand ring beside torch's."""

import argparse
import re

import torch.distributed as dist

from parlab.collectives.cost import bus_bandwidth
from parlab.distributed import torchrun
from parlab.distributed.measure import sweep
from parlab.units import GB, KB, MB, format_bytes, format_rate, format_seconds


def print_table(timings, n_ranks):
    """Print medians, the ring's ratio to torch's all-reduce, and torch's bus bandwidth."""
    print(f"{'size':>8}{'plain':>15}{'segmented':>17}{'all_reduce':>12}{'bus':>11}  checked")
    for timing in timings:
        torchs = timing.median("all_reduce")
        bus = bus_bandwidth("all_reduce", n_ranks, timing.tensor_bytes, torchs)
        columns = [
            f"{format_seconds(timing.median(method)):>9} {timing.ratio(method):4.2f}x"
            for method in ("plain", "segmented")
        ]
        print(
            f"{format_bytes(timing.tensor_bytes):>8}{'  '.join(columns)}"
            f"{format_seconds(torchs):>12}{format_rate(bus):>11}  "
            f"{'equal' if timing.equal else 'DIFFERENT'}"
        )


def sizes(text):
    """Sizes in bytes, four times larger each: "4KB:64MB" (KB = 1000 bytes), the end included."""
    match = re.fullmatch(r"(\d+)([KMG]?B):(\d+)([KMG]?B)", text.strip().upper())
    if not match:
        raise argparse.ArgumentTypeError(f"expected FROM:TO such as 4KB:64MB, got {text!r}")
    unit = {"B": 1, "KB": KB, "MB": MB, "GB": GB}
    first, last = int(match[1]) * unit[match[2]], int(match[3]) * unit[match[4]]
    if not 4 <= first <= last:
        raise argparse.ArgumentTypeError(f"FROM must be at least 4B and at most TO, got {text!r}")
    between = []
    while first < last:
        between.append(first)
        first *= 4
    return [*between, last]


def main(argv=None):
    """The program behind ``python -m parlab.distributed.ring``; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="parlab.distributed.ring",
        description="Time a hand-written ring all-reduce beside dist.all_reduce, under torchrun.",
    )
    parser.add_argument("--sizes", type=sizes, default="4KB:64MB", help="FROM:TO, e.g. 4KB:64MB")
    parser.add_argument("--backend", choices=("gloo", "nccl"), help="default: nccl if usable")
    options = parser.parse_args(argv)
    command = "torchrun --nproc_per_node=2 -m parlab.distributed.ring --sizes 4KB:64MB"
    if torchrun.is_missing(command):
        return 2
    with torchrun.joined_ranks(options.backend) as (backend, device):
        n = dist.get_world_size()
        timings = sweep(options.sizes, ("plain", "segmented", "all_reduce"), device=device)
        if dist.get_rank() == 0:
            print(f"{n} ranks, {backend}, float32; medians and ratios to dist.all_reduce")
            print_table(timings, n)
    return 0 if all(timing.equal for timing in timings) else 1
