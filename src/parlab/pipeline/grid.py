"""A timeline as text: one row a rank, one column a unit of time."""

from parlab.pipeline.actions import short_name
from parlab.pipeline.timeline import Timeline
from parlab.units import require_number

MAX_CELLS = 100_000


def text_grid(timeline, slot=1):
    """Write what each rank runs in each time slot, "." where it is idle; numbers count from 1.

    slot: seconds of a column; every action must start and end between columns. An action over
        several columns is named in each; one that takes no time has none.

    Raises ValueError for actions that do not fit the columns, and beyond 100,000 cells.

    >>> from parlab.pipeline.schedules import one_f_one_b
    >>> from parlab.pipeline.timeline import simulate
    >>> print(text_grid(simulate(one_f_one_b(2, 2), forward=1, backward=2)))
    time    0   1   2   3   4   5   6   7   8
    rank 0  F1  F2  .   .   B1  B1  .   B2  B2
    rank 1  .   F1  B1  B1  F2  B2  B2  .   .
    """
    if not isinstance(timeline, Timeline):
        raise TypeError(f"timeline must be what simulate returns, got {timeline!r:.60}")
    slot = require_number("slot", slot, minimum=0, exclusive=True)
    columns, schedule = timeline.makespan / slot, timeline.schedule
    if columns * schedule.p > MAX_CELLS:
        raise ValueError(
            f"slot must leave at most {MAX_CELLS} cells, got {columns:.3g} columns for each of "
            f"{schedule.p} ranks"
        )
    lines = [("time", *map(str, range(round(columns))))]
    for rank, row in enumerate(schedule.actions):
        cells = ["."] * round(columns)
        for at, action in enumerate(row):
            first = _column(timeline.starts[rank][at], slot)
            after = _column(timeline.ends[rank][at], slot)
            cells[first:after] = [short_name(action, schedule.v)] * (after - first)
        lines.append((f"rank {rank}", *cells))
    first = max(len(line[0]) for line in lines) + 2
    width = max(len(cell) for line in lines for cell in line[1:]) + 2
    return "\n".join(
        (line[0].ljust(first) + "".join(cell.ljust(width) for cell in line[1:])).rstrip()
        for line in lines
    )


def _column(seconds, slot):
    column = round(seconds / slot)
    if abs(seconds / slot - column) > 1e-6:
        raise ValueError(
            f"slot must divide all starts and ends, got {slot} and an action that starts or ends "
            f"at {seconds}"
        )
    return column
