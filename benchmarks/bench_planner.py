"""How long one estimate and a whole search take in plain Python on one core."""

import statistics
import time
from dataclasses import replace

import parlab as pl
from parlab.planner import step

HGX = pl.cluster("hgx-h100")
LAYOUT = pl.Layout(dp=16, tp=2, pp=4, cp=4, zero=1, sequence_parallel=True)
ROUNDS, CALLS = 301, 40  # a round is shorter than what the system gives a process at a time


def microseconds(config, cluster):
    start = time.perf_counter()
    for _ in range(CALLS):
        pl.estimate(config, cluster, LAYOUT, 8192, 1024)
    return 1e6 * (time.perf_counter() - start) / CALLS


def seconds(config, n_nodes, batch):
    """Of a search that finds nothing remembered, and what it considered."""
    step.block.cache_clear()
    start = time.perf_counter()
    found = pl.search(config, replace(HGX, n_nodes=n_nodes), 8192, batch)
    return time.perf_counter() - start, found


def main():
    config, cluster = pl.model("llama-3-70b"), replace(HGX, n_nodes=64)
    times = [microseconds(config, cluster) for _ in range(ROUNDS)]
    tenth, *_ = statistics.quantiles(times, n=10)
    print(f"estimate: median {statistics.median(times):.1f} µs, a tenth below {tenth:.1f}")
    for n_nodes, batch in ((64, 1024), (8, 256), (1, 64)):
        times = [seconds(config if n_nodes > 1 else pl.model("llama-3-8b"), n_nodes, batch)]
        times += [seconds(times[0][1].best.job.config, n_nodes, batch) for _ in range(4)]
        found = times[0][1]
        print(
            f"search on {8 * n_nodes} GPUs: {statistics.median(t for t, _ in times):.3f} s, "
            f"{found.considered:,} layouts considered, {found.candidates:,} not ruled out by bounds"
        )


if __name__ == "__main__":
    main()
