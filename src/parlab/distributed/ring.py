"""Execute any collective schedule between real processes, message by message.

    torchrun --nproc_per_node=2 -m parlab.distributed.ring --sizes 4KB:64MB

compares the hand-written ring with `dist.all_reduce` on one machine; on two machines, run on both

    torchrun --nnodes=2 --nproc_per_node=8 --rdzv-backend=c10d --rdzv-endpoint=HOST:29400 \
        -m parlab.distributed.ring --sizes 4KB:1GB

where HOST is one of the two. With cards it uses nccl, else gloo; see --backend. The nccl path
follows torch's documentation but has never been run: the tests have no two cards.

torchrun's notice that it sets OMP_NUM_THREADS to 1 is harmless, and set beforehand it is silent. So
are warnings that an IPv6 address is not available, where IPv4 then answers; an IPv4 address as HOST
avoids them.
"""

import sys
from dataclasses import dataclass

import torch
import torch.distributed as dist

from parlab.distributed import compat
from parlab.units import require_choice, require_int

SEGMENT_BYTES = 4 * 2**20  # 1 to 8 MiB measured alike; below, the cost of a message shows


def run_schedule(schedule, tensor, group=None, *, segment_bytes=SEGMENT_BYTES, out=None):
    """Carry out this rank's sends and receives; return (result, bytes that this rank sent).

    Every rank of the group calls it with the same schedule and a tensor of the same shape and
    dtype. The tensor is read flat and cut into `schedule.n_chunks` pieces, sized as by
    `torch.tensor_split`; strided tensors are right, and the tensor is not changed. The result has
    its shape and holds what the schedule leaves: after an all-reduce the same bits on every rank;
    after a reduce-scatter, chunk c is finished on rank `schedule.owner[c]` and partial elsewhere.
    An all-gather or a broadcast reads chunk c from its owner only.

    Parameters
    ----------
    schedule : from `parlab.collectives.schedules`, for as many ranks as the group has.
    tensor : any dtype; a sum that leaves the range of an integer dtype wraps, as in
        ``torch.add``: convert to int64 first, or use `all_reduce`, which refuses it.
    segment_bytes : chunks travel in segments of at most this size, so that a segment is added and
        sent on while the next still arrives. None sends whole chunks, one batch a step; nccl
        always does.
    out : contiguous tensor for the result, such as that of the previous call; None makes one.
        It must not share memory with `tensor`. A large new tensor can cost as much time as the
        transfer, since the system has to find and clear its pages.

    Errors
    ------
    ValueError : a schedule for another number of ranks, or an `out` that does not fit.

    >>> from parlab.collectives.schedules import ring_all_reduce_schedule
    >>> from parlab.distributed.launch import run_ranks
    >>> def reduce_ones():
    ...     result, sent = run_schedule(ring_all_reduce_schedule(4), torch.ones(64))
    ...     return result.tolist() == [4.0] * 64, sent
    >>> run_ranks(reduce_ones, 4)[0]  # 2 (N - 1) / N of 256 bytes
    (True, 384)
    """
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    if schedule.n_ranks != n:
        raise ValueError(f"schedule is for {schedule.n_ranks} ranks, but the group has {n}")
    if segment_bytes is not None:
        require_int("segment_bytes", segment_bytes, minimum=1, why="None sends whole chunks")
    if out is None:
        out = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    elif out.shape != tensor.shape or out.dtype != tensor.dtype or not out.is_contiguous():
        raise ValueError(
            f"out must be contiguous with the tensor's shape {tuple(tensor.shape)} and dtype "
            f"{tensor.dtype}, got {tuple(out.shape)} and {out.dtype}"
        )
    elif out.numel() and out.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr():
        raise ValueError("out must not share memory with the tensor, which is read to the end")
    grouped = segment_bytes is None or compat.messages_must_be_grouped(tensor, group)
    per_segment = tensor.numel() if grouped else max(1, segment_bytes // tensor.element_size())
    chunks = _chunks_of_segments(tensor, out, schedule.n_chunks, per_segment, group)
    steps = [_messages_of(rank, step, chunks) for step in schedule.steps]
    sent = _run_grouped(steps) if grouped else _run_streaming(steps)
    for segment in (segment for chunk in chunks for segment in chunk):
        segment.finish()
    return out, sent


def all_reduce(tensor, op="sum", group=None):
    """`dist.all_reduce` that is right or refuses: returns a new tensor, the same on all ranks.

    torch's own (2.13, gloo) returns wrong sums for a strided column without a word, lets integers
    wrap, and truncates or refuses their mean depending on the backend.

    Parameters
    ----------
    tensor : any shape and strides; not changed.
    op : "sum", or "mean" over the ranks, of floating-point tensors only.

    Errors
    ------
    TypeError : the mean of integers, which is no integer; or a boolean tensor.
    ValueError : on all ranks, where an integer sum leaves the range of the tensor's dtype.

    >>> from parlab.distributed.launch import run_ranks
    >>> def mean_of_3_and_4():
    ...     return all_reduce(torch.tensor([3.0 + dist.get_rank()]), op="mean").item()
    >>> run_ranks(mean_of_3_and_4, 2)
    [3.5, 3.5]
    """
    op = require_choice("op", op, ("sum", "mean"))
    if tensor.dtype == torch.bool:
        raise TypeError("tensor must hold numbers, got torch.bool: convert it to an integer dtype")
    if tensor.is_floating_point() or tensor.is_complex():
        result = _contiguous_copy(tensor)
        dist.all_reduce(result, group=group)
        return result.div_(dist.get_world_size(group)) if op == "mean" else result
    if op == "mean":
        raise TypeError(
            f"the mean of {tensor.dtype} is no integer (of 3 and 4 it is 3.5): "
            "convert the tensor to a floating-point dtype first"
        )
    return _checked_integer_sum(tensor, group)


def _checked_integer_sum(tensor, group):
    total = _contiguous_copy(tensor).to(torch.int64)
    bounds = torch.iinfo(tensor.dtype)
    # float64 tells a wrapped int64 apart: its rounding is far smaller than the 2^64 of a wrap.
    rough = total.double()
    dist.all_reduce(total, group=group)
    dist.all_reduce(rough, group=group)
    wrapped = (rough - total.double()).abs() > 2.0**62
    if (wrapped | (total < bounds.min) | (total > bounds.max)).any():
        raise ValueError(
            f"a sum leaves the range of {tensor.dtype}, {bounds.min} to {bounds.max}: "
            "convert the tensor to a wider dtype first"
        )
    return total.to(tensor.dtype)


def _contiguous_copy(tensor):
    return tensor.detach().clone(memory_format=torch.contiguous_format)


def _chunks_of_segments(tensor, out, n_chunks, per_segment, group):
    """chunks[c] lists the segments of chunk c; an empty chunk has none and is never sent."""

    def cut(flat):
        return [c.split(per_segment) if c.numel() else () for c in flat.tensor_split(n_chunks)]

    return [
        [_Segment(source, target, group) for source, target in zip(sources, targets, strict=True)]
        for sources, targets in zip(
            cut(tensor.detach().contiguous().view(-1)), cut(out.view(-1)), strict=True
        )
    ]


def _messages_of(rank, step, chunks):
    """What one rank does in a step: sends (segment, peer) and receives (segment, peer, reduce)."""
    sends = [(segment, s.dst) for s in step if s.src == rank for segment in chunks[s.chunk]]
    receives = [
        (segment, s.src, s.reduce) for s in step if s.dst == rank for segment in chunks[s.chunk]
    ]
    return sends, receives


@dataclass
class _Arrival:
    buffer: torch.Tensor
    reduce: bool
    work: dist.Work | None = None


class _Segment:
    """A piece of a chunk: its value is in the caller's tensor until the first message arrives.

    Sending straight from the caller's tensor and receiving straight into the result spares the
    copy of the input and, for the first sum, a receive buffer.
    """

    def __init__(self, source, target, group):
        self.value = source
        self.target = target
        self.group = group
        self.arriving = []  # messages not yet taken in
        self.leaving = []  # works that read `value`

    def expect(self, reduce, leaving_now):
        """Choose where the next message lands; `leaving_now`: this step sends the segment too."""
        buffer = self.target
        if self.arriving or (self.value is self.target and (reduce or leaving_now)):
            buffer = torch.empty_like(self.target)
        elif self.value is self.target:
            _wait_for(self.leaving)
        self.arriving.append(_Arrival(buffer, reduce))
        return self.arriving[-1]

    def settle(self):
        """Take in what has arrived, so that `value` is up to date."""
        for arrival in self.arriving:
            arrival.work.wait()
            if self.value is self.target:
                _wait_for(self.leaving)  # they still read what is about to be overwritten
            if arrival.reduce:
                torch.add(self.value, arrival.buffer, out=self.target)
            elif arrival.buffer is not self.target:
                self.target.copy_(arrival.buffer)
            self.value = self.target
        self.arriving.clear()

    def finish(self):
        self.settle()
        _wait_for(self.leaving)
        if self.value is not self.target:
            self.target.copy_(self.value)


def _wait_for(works):
    for work in works:
        work.wait()
    works.clear()


def _run_grouped(steps):
    """One batch of messages a step; returns the bytes sent."""
    sent = 0
    for sends, receives in steps:
        for segment, _ in sends:
            segment.settle()
        sent += _post(sends, receives)
    return sent


def _run_streaming(steps):
    """Receives are posted one step ahead; a segment leaves while the next one still arrives."""
    # A segment sent and received in one step has to leave with its old value, so not ahead there.
    ahead = [not _both_ways(sends, receives) for sends, receives in steps]
    if ahead and ahead[0]:
        _post([], steps[0][1])
    sent = 0
    for t, (sends, receives) in enumerate(steps):
        for segment, peer in sends:
            segment.settle()
            sent += _post([(segment, peer)], [])
        if not ahead[t]:
            _post([], receives, leaving_now=True)
        if t + 1 < len(steps) and ahead[t + 1]:
            _post([], steps[t + 1][1])
    return sent


def _both_ways(sends, receives):
    return not {segment for segment, _ in sends}.isdisjoint({segment for segment, *_ in receives})


def _post(sends, receives, leaving_now=None):
    """Start these messages in one batch; returns the bytes sent."""
    if leaving_now is None:
        leaving_now = _both_ways(sends, receives)
    arrivals = [segment.expect(reduce, leaving_now) for segment, _, reduce in receives]
    operations = [
        dist.P2POp(dist.isend, segment.value, group=segment.group, group_peer=peer)
        for segment, peer in sends
    ] + [
        dist.P2POp(dist.irecv, arrival.buffer, group=segment.group, group_peer=peer)
        for arrival, (segment, peer, _) in zip(arrivals, receives, strict=True)
    ]
    works = dist.batch_isend_irecv(operations) if operations else []
    if len(works) < len(operations):
        works = works * len(operations)  # nccl answers once for the whole batch
    for (segment, _), work in zip(sends, works, strict=False):
        segment.leaving.append(work)
    for arrival, work in zip(arrivals, works[len(sends) :], strict=True):
        arrival.work = work
    return sum(operation.tensor.nbytes for operation in operations[: len(sends)])


if __name__ == "__main__":
    from parlab.distributed.compare import main

    sys.exit(main())
