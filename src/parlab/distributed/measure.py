"""Time collectives on real ranks, and count the bytes that they put on the wire.

Every function here is called by all ranks alike, as a collective is: inside `run_ranks` or under
torchrun.
"""

import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from parlab.collectives.schedules import ring_all_reduce_schedule
from parlab.distributed import compat
from parlab.distributed.ring import run_schedule

MOST_REPEATS = 101  # enough of the smallest messages
PERIOD = 97  # test values repeat with it: small whole numbers, so that every order of sums is exact
NETWORK_COUNTERS = Path("/proc/net/dev")
TRANSFER_EVENT, ENQUEUE_EVENT = "gloo:all_reduce", "c10d::allreduce_"


@dataclass(frozen=True)
class Timing:
    """Repeated times of some all-reduce methods for one tensor size, the methods taken in turn.

    tensor_bytes: S, on every rank.
    seconds: for each method the tuple of its times; a time is that of the slowest rank.
    equal: whether every method's result was the exact sum on every rank.
    """

    tensor_bytes: int
    seconds: dict[str, tuple[float, ...]]
    equal: bool

    def median(self, method):
        return statistics.median(self.seconds[method])

    def ratio(self, method, to="all_reduce"):
        """Median of the ratios of neighbours in time: a busy moment slows both of a pair."""
        pairs = zip(self.seconds[method], self.seconds[to], strict=True)
        return statistics.median(mine / theirs for mine, theirs in pairs)


def sweep(sizes_bytes, methods=("all_reduce",), *, seconds_per_size=0.5, at_least=3, device="cpu"):
    """Time all-reduces of float32 tensors on all ranks of the default group; return Timings.

    Parameters
    ----------
    sizes_bytes : tensor sizes, each at least 4 bytes; rounded down to whole float32 elements.
    methods : names from "all_reduce" (torch's own, in place), "segmented" and "plain" (the ring of
        `run_schedule`, in segments into a tensor that is reused, or whole chunk by whole chunk
        into a new one).
    seconds_per_size : about how long each size is repeated, though `at_least` so often and at most
        101 times.
    """
    return [
        _time_size(int(size), methods, seconds_per_size, at_least, device) for size in sizes_bytes
    ]


def _time_size(tensor_bytes, methods, seconds, at_least, device):
    n, rank = dist.get_world_size(), dist.get_rank()
    elements = tensor_bytes // 4
    if elements < 1:
        raise ValueError(f"a size must be at least 4 bytes, one float32, got {tensor_bytes}")
    pattern = torch.arange(PERIOD, dtype=torch.float32, device=device).add_(rank)
    mine = pattern.repeat(elements // PERIOD + 1)[:elements]
    calls = {method: _CALLS[method](mine) for method in methods}
    total = mine.mul(n).add_(n * (n - 1) // 2 - n * rank)
    equal = all([torch.equal(call(), total) for call in calls.values()])  # no rank may stop early
    del total
    first = [_time(call, mine.device) for call in calls.values()]
    # All ranks have to repeat equally often: let the slowest decide.
    agreed = torch.tensor([sum(first), float(not equal)], device=device)
    dist.all_reduce(agreed, op=dist.ReduceOp.MAX)
    repeats = max(at_least, min(MOST_REPEATS, int(seconds / agreed[0].item())))
    times = torch.tensor(
        [first]
        + [[_time(call, mine.device) for call in calls.values()] for _ in range(repeats - 1)],
        dtype=torch.float64,
        device=device,
    )
    dist.all_reduce(times, op=dist.ReduceOp.MAX)
    by_method = {method: tuple(times[:, i].tolist()) for i, method in enumerate(calls)}
    return Timing(mine.nbytes, by_method, not agreed[1].item())


def _time(call, device):
    dist.barrier()
    compat.synchronise(device)
    start = time.perf_counter()
    call()
    compat.synchronise(device)
    return time.perf_counter() - start


def _torch_all_reduce(mine):
    buffer = mine.clone()

    def call():
        dist.all_reduce(buffer)
        return buffer

    return call


def _ring(segmented):
    def prepare(mine):
        schedule = ring_all_reduce_schedule(dist.get_world_size())
        if not segmented:
            return lambda: run_schedule(schedule, mine, segment_bytes=None)[0]
        out = torch.empty_like(mine)
        return lambda: run_schedule(schedule, mine, out=out)[0]

    return prepare


_CALLS = {
    "all_reduce": _torch_all_reduce,
    "segmented": _ring(segmented=True),
    "plain": _ring(segmented=False),
}


def wire_bytes(call, tries=3):
    """Run ``call()`` on all ranks; return the bytes that crossed this machine's loopback, or None.

    The system's own counter, so headers and any other loopback traffic are in it: the least of
    several tries is returned. A ring all-reduce of S bytes puts 2 (N - 1) S on the wire, summed
    over the ranks; the counter reads up to 2% more for S of 1 MB and above. None where the system
    has no such counter (only Linux has).
    """
    counts = []
    for _ in range(tries):
        dist.barrier()
        before = _loopback_bytes()
        dist.barrier()  # nobody sends before all have read
        call()
        dist.barrier()
        after = _loopback_bytes()
        if before is None:
            return None
        counts.append(after - before)
    return min(counts)


def _loopback_bytes():
    if not NETWORK_COUNTERS.exists():
        return None
    for line in NETWORK_COUNTERS.read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == "lo":
            return int(counters.split()[0])  # received
    return None


def profile_all_reduce(tensor_bytes, repeats=5):
    """Seconds that torch.profiler saw in each `dist.all_reduce` on this rank: (transfer, enqueue).

    The call only puts the operation on a queue (`c10d::allreduce_`); a thread of gloo carries it
    out (`gloo:all_reduce`). The caller notices the second one when it waits.
    """
    from torch.profiler import ProfilerActivity, profile

    tensor = torch.zeros(int(tensor_bytes) // 4)
    dist.all_reduce(tensor)
    dist.barrier()
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiler:
        for _ in range(repeats + 1):  # the first also pays for the start of the profiler
            dist.all_reduce(tensor)
    seconds = {TRANSFER_EVENT: [], ENQUEUE_EVENT: []}
    for event in profiler.events():
        if event.name in seconds:
            seconds[event.name].append(event.time_range.elapsed_us() / 1e6)
    return seconds[TRANSFER_EVENT][1:], seconds[ENQUEUE_EVENT][1:]
