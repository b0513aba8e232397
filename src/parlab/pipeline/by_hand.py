"""Schedules that a reader writes: short names in, a checked Schedule out."""

from parlab.pipeline.actions import parse_action
from parlab.pipeline.schedules import Schedule, loop
from parlab.pipeline.timeline import simulate


def schedule_by_hand(rows, stages=None, *, name="by hand"):
    """Return a Schedule from each rank's actions, once it is known to run to its end.

    rows: for each rank a text such as "F1 F2 B1 B2" (with F1.2 for the second chunk; numbers from
        1, as `text_grid` prints them), or Actions or (kind, micro_batch, chunk), from 0.
    stages: stages[rank][chunk]; None makes chunk c of rank r stage c p + r.

    Raises ValueError or TypeError, with rank and position, for what is no action, for one that is
    repeated or missing, and for a deadlock, with the actions that wait.

    >>> naive = schedule_by_hand(["F1 B1 F2 B2", "F1 B1 F2 B2"])
    >>> simulate(naive).idle_fraction
    0.5
    >>> schedule_by_hand(["F1 B1 F2 B2", "F1 F2 B1 B2"])
    Traceback (most recent call last):
    ...
    ValueError: the schedule is a deadlock: rank 0 waits at position 1 with B1 for B1 of rank 1; \
rank 1 waits at position 1 with F2 for F2 of rank 0
    """
    many = isinstance(rows, (list, tuple)) and all(isinstance(r, (str, list, tuple)) for r in rows)
    if not many:
        raise TypeError(f"rows must be one list or text for each rank, got {rows!r:.60}")
    rows = [row.split() if isinstance(row, str) else row for row in rows]
    rows = [
        [parse_action(entry, f"rank {rank}, position {at}") for at, entry in enumerate(row)]
        for rank, row in enumerate(rows)
    ]
    for rank, row in enumerate(rows):
        if not row:
            raise ValueError(f"rank {rank} must run something, got no action")
    if not rows:
        raise ValueError("rows must have at least one rank, got none")
    m = 1 + max(action.micro_batch for row in rows for action in row)
    v = 1 + max(action.chunk for row in rows for action in row)
    if v > max(map(len, rows)):
        raise ValueError(f"chunks must be numbered without gaps, got the number {v}")
    schedule = Schedule(name, m, loop(len(rows), v) if stages is None else stages, rows)
    simulate(schedule)
    return schedule
