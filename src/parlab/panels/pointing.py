"""Names what a reader points at in a Gantt chart, found from the numbers of its timeline."""

from bisect import bisect_right
from collections import Counter

from parlab.panels.panel import Pointed
from parlab.pipeline.actions import HOLDS, KINDS, short_name

NOTHING = Pointed("", "", "", None)
AROUND = 2  # keeps the outline off a narrow bar


def point_at(gantt, x, y):
    """Name the action or the idle time at a point of the picture; `NOTHING` beside the lanes."""
    place = gantt.place(x, y)
    if place is None:
        return NOTHING
    rank, seconds = place
    found = gantt.timeline.action_at(rank, seconds)
    return _idle(gantt, rank, seconds) if found is None else _named(gantt, rank, found.position)


def step_to(gantt, at, keys):
    """Name the action that arrow keys, Home and End lead to, key by key.

    at: (rank, position) of the action before; None starts at the first action of rank 0, which the
        first key shows, whatever it is.
    """
    if at is None:
        at, keys = (0, 0), keys[1:]
    for key in keys:
        at = _stepped(gantt.timeline, *at, key)
    return _named(gantt, *at)


def _stepped(timeline, rank, position, key):
    last = len(timeline.schedule.actions[rank]) - 1
    if key in ("ArrowUp", "ArrowDown"):
        other = rank + (1 if key == "ArrowDown" else -1)
        if not 0 <= other < timeline.schedule.p:
            return rank, position
        middle = (timeline.starts[rank][position] + timeline.ends[rank][position]) / 2
        return other, _nearest(timeline, other, middle)
    moves = {"ArrowLeft": position - 1, "ArrowRight": position + 1, "Home": 0, "End": last}
    return rank, min(max(moves[key], 0), last)


def _nearest(timeline, rank, seconds):
    """The action of a rank that runs at a moment or, where it idles, ends or starts closest."""
    starts, ends = timeline.starts[rank], timeline.ends[rank]
    after = bisect_right(starts, seconds)
    if after == 0:
        return 0
    if after < len(starts) and starts[after] - seconds < seconds - ends[after - 1]:
        return after
    return after - 1


def _named(gantt, rank, position):
    timeline = gantt.timeline
    schedule = timeline.schedule
    action = schedule.actions[rank][position]
    start, end = timeline.starts[rank][position], timeline.ends[rank][position]
    chunk = f", chunk {action.chunk + 1}" if schedule.v > 1 else ""
    label = (
        f"Rank {rank}, {short_name(action, schedule.v)}: {KINDS[action.kind]} of micro-batch "
        f"{action.micro_batch + 1}{chunk}, {_from_to(start, end)}. "
        f"{_in_flight(schedule, rank, position, including=action.kind == 'F')}"
    )
    outline = gantt.box(action.kind, rank, start, end, AROUND)
    return Pointed(label, outline, _trail(gantt, action.micro_batch), (rank, position))


def _trail(gantt, micro_batch):
    """Outlines of all actions of a micro-batch, on every rank."""
    timeline = gantt.timeline
    return "".join(
        gantt.box(action.kind, rank, timeline.starts[rank][n], timeline.ends[rank][n])
        for rank, row in enumerate(timeline.schedule.actions)
        for n, action in enumerate(row)
        if action.micro_batch == micro_batch
    )


def _idle(gantt, rank, seconds):
    timeline = gantt.timeline
    starts, ends = timeline.starts[rank], timeline.ends[rank]
    after = bisect_right(starts, seconds)
    start = ends[after - 1] if after else 0
    end = starts[after] if after < len(starts) else timeline.makespan
    label = (
        f"Rank {rank} idles {_from_to(start, end)}. "
        f"{_in_flight(timeline.schedule, rank, after, including=False)}"
    )
    return Pointed(label, gantt.box("B", rank, start, end, AROUND), "", None)


def _from_to(start, end):
    return f"from {start:.4g} to {end:.4g} F"


def _in_flight(schedule, rank, position, including):
    """Say what a rank holds once it has run its actions before `position`, or that one too."""
    passes = Counter()
    for kind, micro_batch, _ in schedule.actions[rank][: position + including]:
        passes[micro_batch] += HOLDS[kind]
    held = sorted(micro_batch + 1 for micro_batch, n in passes.items() if n)
    if not held:
        return "In flight on it: nothing."
    many = f"{len(held)} micro-batch{'es' if len(held) > 1 else ''}"
    if schedule.v > 1:
        chunks = sum(passes.values())
        many = f"{chunks} chunk{'s' if chunks > 1 else ''} of {many}"
    return f"In flight on it: {many} ({_ranges(held)})."


def _ranges(numbers):
    """Write ascending numbers with their runs drawn together.

    >>> _ranges([1, 2, 3, 5, 7, 8])
    '1–3, 5, 7–8'
    """
    runs = []
    for number in numbers:
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(f"{a}–{b}" if a < b else f"{a}" for a, b in runs)
