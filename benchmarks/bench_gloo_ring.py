"""The hand-written ring beside `dist.all_reduce`, on gloo processes of this machine.

    python benchmarks/bench_gloo_ring.py

Both work on float32 tensors that are already there: `dist.all_reduce` in place, the segmented ring
from one tensor into another that is reused. The plain ring waits for each step, sends whole chunks
and allocates its result every time, as a first version does. Calls alternate, so that a busy moment
slows both; a ratio is the median over neighbouring pairs. Ratios compare within one run only.
"""

import sys

from parlab.distributed.launch import run_ranks

TARGET = 1.15  # at 64 MB with 2 ranks
PAIRS = 25
SIZES = [4_000 * 4**k for k in range(7)] + [64_000_000]


def headline():
    from parlab.distributed.measure import sweep

    return sweep([64_000_000], ("segmented", "all_reduce"), at_least=PAIRS)[0]


def table():
    from parlab.distributed.measure import sweep

    return sweep(SIZES, ("plain", "segmented", "all_reduce"), seconds_per_size=0.4, at_least=5)


def main():
    """Print the headline ratio and a table for 2 and for 4 ranks; returns the headline ratio."""
    from parlab.distributed.compare import print_table

    timing = run_ranks(headline, 2, timeout=120)[0]
    ratio = timing.ratio("segmented")
    print(
        f"hand ring / dist.all_reduce, 64 MB, 2 ranks: {ratio:.2f}x "
        f"(median of {len(timing.seconds['segmented'])} pairs; target at most {TARGET}x: "
        f"{'met' if ratio <= TARGET else 'MISSED'})"
    )
    for n in (2, 4):
        print(f"\n{n} ranks; x: ratio to all_reduce")
        print_table(run_ranks(table, n, timeout=240)[0], n)
    return ratio


if __name__ == "__main__":
    sys.exit(main() > TARGET)
