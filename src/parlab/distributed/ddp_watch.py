"""Watch DistributedDataParallel at work: what it sends in which bucket, and when.

Both functions are called by every rank alike, inside `run_ranks` or under torchrun.
"""

import time
from dataclasses import dataclass, field
from typing import NamedTuple

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile, record_function

from parlab.distributed import compat
from parlab.distributed.gpt import GPT, GPTConfig, token_batch, token_loss
from parlab.distributed.measure import TRANSFER_EVENT
from parlab.units import require_int

# 3.45 MB of float32 gradients: enough for several buckets, and for transfers that show.
SMALL = GPTConfig(vocab=512, layers=4, hidden=128, heads=4, sequence=32)
NODE_EVENT = "autograd::engine::evaluate_function: "
SAME_SPELL_S = 1e-4  # between two nodes of the graph: the engine's own work


@dataclass
class Bucket:
    """One all-reduce of gradients.

    index: its place in the order of transfers. parameters: names, in the order of the buffer.
    started_s, finished_s: when it was handed over and when the sum was there, since the start of
        the backward pass.
    """

    index: int
    n_bytes: int
    parameters: tuple[str, ...]
    started_s: float
    finished_s: float | None = None


@dataclass(frozen=True)
class Buckets:
    """What `record_buckets` saw on one rank.

    ready: (name, bytes) of each parameter, in the order in which the first backward pass finished
        their gradients. DDP refills its buckets in this order.
    iterations: for each iteration its buckets, in the order of transfer.
    backward_s: for each iteration the time of the backward pass, transfers included.
    """

    ready: tuple[tuple[str, int], ...]
    iterations: tuple[tuple[Bucket, ...], ...] = field(repr=False)
    backward_s: tuple[float, ...]

    def sizes(self, iteration):
        """Bytes of each bucket."""
        return [bucket.n_bytes for bucket in self.iterations[iteration]]


def record_buckets(cap_mb=None, iterations=3, *, config=SMALL, rows=2, **ddp_options):
    """Record each bucket that DDP all-reduces, by a communication hook.

    In the first iteration everything is in one bucket, so nothing overlaps. Before the second one
    DDP regroups the parameters by the order in which their gradients became ready.

    Parameters
    ----------
    cap_mb : DDP's bucket_cap_mb, in MiB; fractions are allowed. None is its default: 25, and 1
        for the first bucket.
    iterations : forward and backward passes to record.
    config, rows : the model, in float32, and the sequences of each rank's batch.
    ddp_options : passed on, such as find_unused_parameters=True.

    >>> from parlab.distributed.launch import run_ranks
    >>> buckets = run_ranks(record_buckets, 2, args=(1,))[0]
    >>> buckets.sizes(0)
    [3451904]
    >>> buckets.sizes(1)  # each closes with the parameter that reaches 1 MiB = 1048576 bytes
    [1056768, 1057280, 1058304, 279552]
    """
    require_int("iterations", iterations, minimum=1)
    model = GPT(config)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    ready, recorded, backward_s = [], [], []
    ddp = DistributedDataParallel(model, bucket_cap_mb=compat.bucket_cap_mb(cap_mb), **ddp_options)
    watching = [
        parameter.register_post_accumulate_grad_hook(
            lambda p: ready.append((names[id(p)], p.nbytes))
        )
        for parameter in model.parameters()
    ]
    start = 0.0

    def hook(state, bucket):
        buffer = bucket.buffer().div_(dist.get_world_size())
        mine = tuple(names[id(parameter)] for parameter in bucket.parameters())
        entry = Bucket(bucket.index(), buffer.nbytes, mine, time.perf_counter() - start)
        recorded[-1].append(entry)

        def finish(future):
            entry.finished_s = time.perf_counter() - start
            return future.value()[0]

        return dist.all_reduce(buffer, async_op=True).get_future().then(finish)

    ddp.register_comm_hook(None, hook)
    tokens, targets = token_batch(config, rows, seed=dist.get_rank())
    for _ in range(iterations):
        recorded.append([])
        ddp.zero_grad()
        loss = token_loss(ddp(tokens), targets)
        dist.barrier()  # all ranks start their backward passes together
        start = time.perf_counter()
        loss.backward()
        backward_s.append(time.perf_counter() - start)
        for handle in watching:
            handle.remove()
    return Buckets(tuple(ready), tuple(map(tuple, recorded)), tuple(backward_s))


class Interval(NamedTuple):
    """Something that went on from start_s to end_s: "forward", "backward" or "all_reduce"."""

    start_s: float
    end_s: float
    kind: str


def profile_overlap(cap_mb=1, *, config=SMALL, rows=8, warm_up=3):
    """Intervals of one DDP step on this rank as torch.profiler saw them, from the step's start.

    "backward" is computation only; the time in which the pass waits for transfers is in none of
    its intervals. "all_reduce" runs from the start of a bucket's transfer to its end, so it
    includes waiting for ranks that are not as far. Profiling slows the computation down, which
    hides more of the transfers than usual.

    Parameters
    ----------
    cap_mb : DDP's bucket_cap_mb, in MiB.
    config, rows : the model, in float32, and the sequences of each rank's batch.
    warm_up : steps before the one that counts, at least 2: in the first one there is one bucket.

    Returns a list of `Interval`s in order of their start. See `exposed_seconds`.
    """
    require_int("warm_up", warm_up, minimum=2, why="DDP regroups its buckets before the second")
    ddp = DistributedDataParallel(GPT(config), bucket_cap_mb=compat.bucket_cap_mb(cap_mb))
    tokens, targets = token_batch(config, rows, seed=dist.get_rank())
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiler:
        for step in range(warm_up + 1):
            ddp.zero_grad()
            dist.barrier()
            with record_function(f"step {step}"):
                with record_function(f"forward {step}"):
                    loss = token_loss(ddp(tokens), targets)
                loss.backward()
    events = profiler.events()
    (whole,) = [event for event in events if event.name == f"step {warm_up}"]
    kinds = {f"forward {warm_up}": "forward", TRANSFER_EVENT: "all_reduce"}
    intervals = []
    for event in events:
        kind = "backward" if event.name.startswith(NODE_EVENT) else kinds.get(event.name)
        start_s = (event.time_range.start - whole.time_range.start) / 1e6
        if kind and 0 <= start_s <= whole.time_range.elapsed_us() / 1e6:
            end_s = start_s + event.time_range.elapsed_us() / 1e6
            intervals.append(Interval(start_s, end_s, kind))
    transfers = sorted(i for i in intervals if i.kind != "backward")
    return sorted(transfers + _joined(i for i in intervals if i.kind == "backward"))


def exposed_seconds(intervals):
    """Time in which all-reduces run and the rank computes nothing: what they add to the step.

    >>> exposed_seconds([Interval(0, 5, "backward"), Interval(3, 6, "all_reduce")])
    1
    """
    computing = [i for i in intervals if i.kind != "all_reduce"]
    transferring = _joined((i for i in intervals if i.kind == "all_reduce"), gap_s=0)
    overlap = sum(
        max(0, min(a.end_s, b.end_s) - max(a.start_s, b.start_s))
        for a in transferring
        for b in computing
    )
    return max(0, sum(i.end_s - i.start_s for i in transferring) - overlap)


def _joined(intervals, gap_s=SAME_SPELL_S):
    """Intervals of one kind, those that touch or nearly touch made one."""
    joined = []
    for interval in sorted(intervals):
        if joined and interval.start_s <= joined[-1].end_s + gap_s:
            end_s = max(joined[-1].end_s, interval.end_s)
            joined[-1] = joined[-1]._replace(end_s=end_s)
        else:
            joined.append(interval)
    return joined
