"""DDP's buckets: which gradients travel together, when, and how much of it backward hides.

DistributedDataParallel packs gradients into buckets and all-reduces a bucket as soon as backward
has produced all of it (Li et al. 2020, VLDB 13(12), section 3.2).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from parlab.collectives.cost import all_reduce_cost
from parlab.units import MIB, require_int, require_number

DEFAULT_CAP_BYTES = 25 * MIB
DEFAULT_FIRST_CAP_BYTES = MIB


class Bucket(NamedTuple):
    """Indices of the parameters whose gradients travel together, and the bytes of all of them."""

    parameters: tuple[int, ...]
    bytes: int


def ddp_buckets(parameter_bytes, cap_bytes=None, first_cap_bytes=None, *, order=None):
    """Group gradients into buckets as torch 2.13's DDP does from its second iteration on.

    Gradients join the open bucket in the order in which backward produces them, and the bucket
    closes once its size reaches the cap. It thus overshoots: a bucket may be almost a whole
    parameter larger than the cap, and a parameter is never cut.

    In its first iteration DDP does not know the order yet and puts everything into one bucket. With
    find_unused_parameters=True it never learns it: it then cuts in the order of definition, from
    the first iteration on, and sends the buckets in reverse.

    Parameters
    ----------
    parameter_bytes : bytes of each parameter's gradient, in the order of their definition; all of
        one dtype (others would fill buckets of their own).
    cap_bytes : None for torch's default, 25 MiB with a first bucket of 1 MiB. `bucket_cap_mb=x` in
        torch is x MiB; 0 gives every parameter a bucket of its own.
    first_cap_bytes : cap of the first bucket; None for `cap_bytes`, unless that is None.
    order : indices of the parameters in the order in which their gradients are ready; None for the
        reverse of their definition.

    >>> [bucket.bytes for bucket in ddp_buckets([400, 300, 200, 100], cap_bytes=250)]
    [300, 300, 400]
    >>> [bucket.parameters for bucket in ddp_buckets([400, 300, 200, 100], cap_bytes=250)]
    [(3, 2), (1,), (0,)]
    """
    sizes = [require_int("parameter_bytes", size, minimum=0) for size in parameter_bytes]
    if first_cap_bytes is None:
        first_cap_bytes = DEFAULT_FIRST_CAP_BYTES if cap_bytes is None else cap_bytes
    cap_bytes = DEFAULT_CAP_BYTES if cap_bytes is None else cap_bytes
    first = require_int("first_cap_bytes", first_cap_bytes, minimum=0)
    later = require_int("cap_bytes", cap_bytes, minimum=0)
    order = list(range(len(sizes)))[::-1] if order is None else list(order)
    if sorted(order) != list(range(len(sizes))):
        raise ValueError(
            f"order must name each of the {len(sizes)} parameters once, got {len(order)} indices"
        )
    buckets, members, filled = [], [], 0
    for index in order:
        members.append(index)
        filled += sizes[index]
        if filled >= (later if buckets else first):
            buckets.append(Bucket(tuple(members), filled))
            members, filled = [], 0
    if members:
        buckets.append(Bucket(tuple(members), filled))
    return buckets


@dataclass(frozen=True)
class Overlap:
    """When each bucket is ready, and when its all-reduce starts and ends; seconds from the start of
    backward, one entry per bucket."""

    backward_seconds: float
    ready: tuple[float, ...]
    start: tuple[float, ...]
    end: tuple[float, ...]

    @property
    def total_seconds(self):
        """From the start of backward until the last all-reduce has ended."""
        return max((self.backward_seconds, *self.end[-1:]))

    @property
    def exposed_seconds(self):
        """How long the step waits for communication after backward has finished."""
        return self.total_seconds - self.backward_seconds

    @property
    def communication_seconds(self):
        """What all all-reduces take together, hidden or not."""
        return sum(end - start for start, end in zip(self.start, self.end, strict=True))


def overlap(bucket_bytes: Sequence[int], backward_seconds, n_ranks, link, *, ready=None) -> Overlap:
    """Lay the buckets' all-reduces beside backward, one after the other on one link.

    A bucket's all-reduce starts when its last gradient is ready and the one before has ended, and
    takes the ring's time: start_i = max(ready_i, end_(i-1)). Every rank is equally fast, and
    computing and communicating do not slow each other.

    Parameters
    ----------
    bucket_bytes : bytes of the buckets in the order in which they become ready.
    backward_seconds : the time of backward alone.
    n_ranks, link : the all-reduce, as in `all_reduce_cost`.
    ready : seconds at which each bucket is ready, not decreasing; None for a backward that takes
        equally long for every byte of gradient, as matrix products do (4 FLOP a weight and token).

    >>> from parlab.hardware import Link
    >>> one_GB_a_second = Link(0, 1e9)
    >>> timeline = overlap([10**9, 10**9], 4.0, 2, one_GB_a_second)
    >>> timeline.ready, timeline.start, timeline.end, timeline.exposed_seconds
    ((2.0, 4.0), (2.0, 4.0), (3.0, 5.0), 1.0)
    """
    sizes = list(bucket_bytes)
    # Layers repeat, so do the sizes of their buckets.
    takes = {size: _all_reduce_seconds(n_ranks, size, link) for size in {*sizes}}
    backward = require_number("backward_seconds", backward_seconds, minimum=0)
    if ready is None:
        produced = list(accumulate(sizes))
        whole = produced[-1] if sizes else 0
        ready = [backward * (filled / whole if whole else 1) for filled in produced]
    else:
        ready = [require_number("ready", moment, minimum=0) for moment in ready]
        if len(ready) != len(sizes) or ready != sorted(ready):
            raise ValueError(
                f"ready must be one time per bucket ({len(sizes)}) that never decreases, "
                f"got {len(ready)}"
            )
    starts, ends, free = [], [], 0.0
    for moment, size in zip(ready, sizes, strict=True):
        starts.append(max(moment, free))
        free = starts[-1] + takes[size]
        ends.append(free)
    return Overlap(backward, tuple(ready), tuple(starts), tuple(ends))


def _all_reduce_seconds(n_ranks, size, link):
    size = require_number("bucket_bytes", size, minimum=0)
    return all_reduce_cost(n_ranks, size, link).seconds
