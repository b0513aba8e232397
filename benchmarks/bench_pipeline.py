"""Pipeline schedules and timelines beside torch's own generators, as ratios in one run.

torch.distributed.pipelining builds each schedule as lists of actions. It has no simulation with
times of its own, so the usual one stands beside ours: a loop over events that keeps what is done in
a dictionary, by name.
"""

import statistics
import subprocess
import sys
import time

import parlab as pl

ROUNDS = 9
MILLION = """
import resource, time
import parlab as pl
start = time.perf_counter()
timeline = pl.simulate(pl.one_f_one_b(128, 4096), 1.0, 2.0)
seconds = time.perf_counter() - start
assert timeline.makespan == (4096 + 127) * 3
print(seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3)
"""


def event_loop(order, forward, backward):
    """The makespan of torch's lists, with seconds for each stage."""
    done, free, position = {}, [0.0] * len(order), [0] * len(order)
    last, moved = len(order) - 1, True
    while moved:
        moved = False
        for rank, row in enumerate(order):
            while position[rank] < len(row):
                stage, kind, i = row[position[rank]]
                if kind == "F":
                    needs = (stage - 1, "F", i) if stage else None
                else:
                    needs = (stage + 1, "B", i) if stage < last else (stage, "F", i)
                if needs is not None and needs not in done:
                    break
                start = max(free[rank], done.get(needs, 0.0))
                free[rank] = start + (forward if kind == "F" else backward)[stage]
                done[stage, kind, i] = free[rank]
                position[rank] += 1
                moved = True
    return max(free)


def seconds(function, *arguments):
    start = time.perf_counter()
    function(*arguments)
    return time.perf_counter() - start


def ours(p, m, forward, backward):
    return pl.simulate(pl.one_f_one_b(p, m), forward, backward).makespan


def theirs(p, m, forward, backward):
    from parlab.distributed import compat

    rows = compat.torch_pipeline_order("1F1B", p, m)
    rows[-1] = [(s, kind, i - (kind == "F")) for s, kind, i in rows[-1] if kind in "FB"]
    rows[:-1] = [[entry for entry in row if entry[1] in "FB"] for row in rows[:-1]]
    return event_loop(rows, forward, backward)


def timelines():
    p, m = 32, 512
    times = [1 + rank % 3 for rank in range(p)], [2 + rank % 5 for rank in range(p)]
    assert ours(p, m, *times) == theirs(p, m, *times)
    # In turn, so that a busy moment slows both sides of a ratio.
    ratios = [seconds(theirs, p, m, *times) / seconds(ours, p, m, *times) for _ in range(ROUNDS)]
    print(
        f"1F1B with unequal stages, p = {p}, m = {m}, order and times: "
        f"{statistics.median(ratios):.1f}x faster than torch's order and a loop over a dictionary"
    )


def million():
    runs = []
    for _ in range(3):
        run = subprocess.run([sys.executable, "-c", MILLION], capture_output=True, text=True)
        runs.append(tuple(map(float, run.stdout.split())))
    took, megabytes = min(runs)
    print(f"1F1B, p = 128, m = 4096, a million actions: {took:.2f} s, {megabytes:.0f} MB in all")
    print(
        f"  four times the micro-batches: {growth(lambda m: ours(32, m, 1.0, 2.0)):.1f}x the time"
    )


def growth(function, m=512):
    """How much longer 4 m take than m, in CPU time; the least of each, as other work only adds."""

    def least(m):
        clock = time.process_time
        return min(-clock() + (function(m), clock())[1] for _ in range(ROUNDS))

    return least(4 * m) / least(m)


def generators():
    from parlab.distributed import compat

    p, m = 8, 512
    print(f"building a schedule, p = {p}, m = {m}")
    for name, theirs_name, v, make in (
        ("interleaved", "Interleaved1F1B", 2, lambda p, m: pl.interleaved_1f1b(p, m, 2)),
        ("ZB-H1", "InterleavedZeroBubble", 1, pl.zero_bubble_h1),
        ("ZB-V", "ZBVZeroBubble", 2, pl.zero_bubble_v),
    ):
        took = seconds(compat.torch_pipeline_order, theirs_name, p, m, v)
        mine = statistics.median(seconds(make, p, m) for _ in range(ROUNDS))
        print(
            f"  {name:12}{took / mine:6.0f}x faster than torch; "
            f"four times the micro-batches: {growth(lambda m, make=make: make(p, m)):.1f}x the time"
        )


if __name__ == "__main__":
    million()  # before torch is loaded: on Linux a child's peak is no less than its parent's size
    timelines()
    generators()
