"""When each action of a schedule runs, and what follows from it: idle time and peaks.

An action starts as soon as its rank is free and its input is there: F needs the activations of the
stage before; B or I the gradient of the stage after, or on the last stage its own F; W its own I.
Between ranks an input travels for `transfer` seconds. The sender goes on at once, messages neither
queue nor slow computing, and a receiver always has room.
"""

from bisect import bisect_right
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from operator import sub
from typing import NamedTuple

from parlab.pipeline.actions import HOLDS, Action
from parlab.pipeline.schedules import Schedule
from parlab.pipeline.sweep import sweep
from parlab.pipeline.times import by_stage, require_seconds, stage_times
from parlab.units import require_choice, require_int

CONVENTIONS = ("total", "ideal", "span")


class Placed(NamedTuple):
    """An action with its position in the rank's list and its time."""

    action: Action
    position: int
    start: float
    end: float


@dataclass(frozen=True, eq=False)
class Timeline:
    """Start and end of every action: starts[rank][n] is that of schedule.actions[rank][n].

    times[kind][stage]: seconds that an action takes.
    """

    schedule: Schedule
    times: dict[str, tuple[float, ...]]
    starts: tuple[tuple[float, ...], ...]
    ends: tuple[tuple[float, ...], ...]

    @cached_property
    def makespan(self):
        """Seconds from the first start to the last end."""
        return max(row[-1] for row in self.ends)

    @cached_property
    def busy(self):
        """Seconds for which each rank works."""
        forward, backward, m = self.times["F"], self.times["B"], self.schedule.m
        return [m * sum(forward[s] + backward[s] for s in row) for row in self.schedule.stages]

    @cached_property
    def idle_in_span(self):
        """Idle seconds of each rank between its own first and last action."""
        pairs = zip(self.starts, self.ends, strict=True)
        return [sum(map(sub, starts[1:], ends)) for starts, ends in pairs]

    @cached_property
    def idle(self):
        """Idle seconds of each rank over the makespan: also before its first, after its last."""
        outside = (self.makespan - self.spans[rank] for rank in range(self.schedule.p))
        return [inside + out for inside, out in zip(self.idle_in_span, outside, strict=True)]

    @cached_property
    def spans(self):
        """Seconds from each rank's own first start to its own last end."""
        return [ends[-1] - starts[0] for starts, ends in zip(self.starts, self.ends, strict=True)]

    @property
    def idle_fraction(self):
        """Idle rank-time over all rank-time: `bubble("total")`, from 0 to 1."""
        return self.bubble("total")

    def bubble(self, of="total"):
        """Idle time of all ranks over their total time, their ideal time or their own spans.

        of: "total", over p x makespan. "ideal", over the time for which they work; this one can
            pass 1. "span", idle time within each rank's own span over these spans, which leaves out
            that a pipeline fills and drains.

        >>> from parlab.pipeline.schedules import one_f_one_b
        >>> timeline = simulate(one_f_one_b(4, 9))
        >>> timeline.bubble(), timeline.bubble("ideal"), timeline.bubble("span")
        (0.25, 0.3333333333333333, 0.14285714285714285)
        """
        idle, over = self._idle_over(of)
        return sum(idle) / sum(over)

    def rank_bubbles(self, of="total"):
        """The same fraction for each rank by itself.

        >>> from parlab.pipeline.schedules import one_f_one_b
        >>> simulate(one_f_one_b(4, 9)).rank_bubbles("span")
        [0.25, 0.18181818181818182, 0.1, 0.0]
        """
        return [idle / over for idle, over in zip(*self._idle_over(of), strict=True)]

    def _idle_over(self, of):
        of = require_choice("of", of, CONVENTIONS)
        if of == "span":
            return self.idle_in_span, self.spans
        if of == "ideal":
            return self.idle, self.busy
        return self.idle, [self.makespan] * self.schedule.p

    @cached_property
    def peak_in_flight(self):
        """Most passes that each rank holds at once, from the start of F to the end of B or W.

        With v chunks a micro-batch counts once for each chunk that it has passed: v of them are as
        large as one micro-batch on a whole rank.

        >>> from parlab.pipeline.schedules import interleaved_1f1b, one_f_one_b
        >>> simulate(one_f_one_b(4, 8)).peak_in_flight
        [4, 3, 2, 1]
        >>> simulate(interleaved_1f1b(4, 8, 2)).peak_in_flight
        [11, 9, 7, 5]
        """
        held = (accumulate(HOLDS[kind] for kind, _, _ in row) for row in self.schedule.actions)
        return [max(row) for row in held]

    @property
    def peak_micro_batches(self):
        """Most different micro-batches of which each rank holds a chunk at once.

        >>> from parlab.pipeline.schedules import interleaved_1f1b
        >>> simulate(interleaved_1f1b(4, 8, 2)).peak_micro_batches
        [8, 8, 7, 5]
        """
        return [_most_micro_batches(row) for row in self.schedule.actions]

    def peak_bytes(self, stage_bytes):
        """Most bytes of activations that each rank holds at once.

        stage_bytes: what one micro-batch keeps in one stage, such as its layers times `layer_bytes`
            of `activation_memory`; one number or one per stage.

        >>> from parlab.pipeline.schedules import one_f_one_b
        >>> simulate(one_f_one_b(4, 8)).peak_bytes(10**9)
        [4000000000, 3000000000, 2000000000, 1000000000]
        """
        schedule = self.schedule
        sizes = by_stage("stage_bytes", stage_bytes, len(schedule.ranks))
        return [
            max(accumulate(HOLDS[kind] * sizes[stages[chunk]] for kind, _, chunk in row))
            for row, stages in zip(schedule.actions, schedule.stages, strict=True)
        ]

    def action_at(self, rank, seconds):
        """What a rank runs at a moment, or None where it is idle; an end is the next start.

        >>> from parlab.pipeline.schedules import gpipe
        >>> timeline = simulate(gpipe(4, 4))
        >>> timeline.action_at(1, 3.5)
        Placed(action=Action(kind='F', micro_batch=2, chunk=0), position=2, start=3.0, end=4.0)
        >>> timeline.action_at(1, 6) is None
        True
        """
        rank = require_int("rank", rank, minimum=0, maximum=self.schedule.p - 1)
        position = bisect_right(self.starts[rank], require_seconds("seconds", seconds)) - 1
        if position < 0 or self.ends[rank][position] <= seconds:
            return None
        action = self.schedule.actions[rank][position]
        return Placed(action, position, self.starts[rank][position], self.ends[rank][position])


def simulate(
    schedule, forward=1.0, backward=1.0, *, input_gradient=None, weight_gradient=None, transfer=0.0
):
    """Run a schedule on paper: every action starts as soon as it can.

    forward, backward: seconds of F and B of one micro-batch through one stage; one number, one per
        rank (for each of its chunks) or one per stage. Of v stages each has 1/v of a rank's layers.
    input_gradient, weight_gradient: seconds of I and W likewise; None is half of backward each.
        Given, they must be both, and a whole B takes their sum: leave `backward` out then.
    transfer: seconds from the end of an action until its output is on another rank: latency and
        bytes over bandwidth. Nothing on the same rank.

    Raises ValueError or TypeError for times that are negative, NaN or too many, and ValueError for
    a schedule whose ranks block each other, with the actions that wait.

    >>> from parlab.pipeline.schedules import interleaved_1f1b, one_f_one_b
    >>> timeline = simulate(one_f_one_b(4, 8), forward=1, backward=2)
    >>> timeline.makespan, timeline.idle, timeline.idle_fraction == 3 / 11
    (33, [9, 9, 9, 9], True)
    >>> simulate(interleaved_1f1b(4, 8, 2), forward=0.5, backward=1).makespan
    28.5
    """
    if not isinstance(schedule, Schedule):
        raise TypeError(f"schedule must be a Schedule, got {schedule!r:.60}: gpipe(4, 8) makes one")
    times = stage_times(schedule.ranks, forward, backward, input_gradient, weight_gradient)
    starts, ends = sweep(schedule, times, require_seconds("transfer", transfer) or 0)
    return Timeline(schedule, times, starts, ends)


def _most_micro_batches(row):
    chunks, most = Counter(), 0
    for kind, micro_batch, _ in row:
        chunks[micro_batch] += HOLDS[kind]
        if not chunks[micro_batch]:
            del chunks[micro_batch]
        most = max(most, len(chunks))
    return most
