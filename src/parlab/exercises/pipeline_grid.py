"""The exercise of chapter 6 on GPipe, drawn as a grid of time slots."""

from parlab.exercises.pipeline_order import draw
from parlab.exercises.records import Case, Exercise, Misconception
from parlab.pipeline.grid import text_grid
from parlab.pipeline.schedules import gpipe
from parlab.pipeline.timeline import simulate


def gpipe_grid(stages, micro_batches):
    """Simulate GPipe: what each stage does in each time slot.

    All forwards, then all backwards, the last micro-batch first; each takes one slot. A forward
    needs the one of the stage before it, a backward that of the stage after it.

    Returns (grid, idle, peak): grid[stage][slot] is "F1", "B1" and so on, numbered from 1, or ".";
    the number of idle slots of all stages; and how many micro-batches a stage holds at most, from
    forward to backward.

    >>> grid, idle, peak = gpipe_grid(2, 2)
    >>> for row in grid:
    ...     print(*row, sep="  ")
    F1  F2  .  .  B2  B1
    .  F1  F2  B2  B1  .
    >>> idle, peak
    (4, 2)
    """
    p, m = stages, micro_batches  # given
    grid = [["."] * (2 * (m + p - 1)) for _ in range(p)]  # given
    for stage in range(p):
        for i in range(m):
            grid[stage][stage + i] = f"F{i + 1}"
            grid[stage][-1 - stage - i] = f"B{i + 1}"
    idle = sum(row.count(".") for row in grid)
    return grid, idle, m


def _expect_grid(stages, micro_batches):
    timeline = simulate(gpipe(stages, micro_batches))
    grid = [line.split()[2:] for line in text_grid(timeline).splitlines()[1:]]
    return grid, sum(row.count(".") for row in grid), max(timeline.peak_in_flight)


# Known mistakes.


def _grid(p, m, forward, backward):
    """A grid from the slots of each pass; what lies outside is left out."""
    grid = [["."] * (2 * (m + p - 1)) for _ in range(p)]
    for stage in range(p):
        for i in range(m):
            for name, slot in (("F", forward(stage, i)), ("B", backward(stage, i))):
                grid[stage][slot] = f"{name}{i + 1}"
    return grid


def _grids(backward, forward=lambda p, m, s, i: s + i):
    def compute(p, m):
        grid = _grid(p, m, lambda s, i: forward(p, m, s, i), lambda s, i: backward(p, m, s, i))
        return grid, sum(row.count(".") for row in grid), m

    return compute


def _with_idle(wrong):
    return lambda p, m: (_expect_grid(p, m)[0], wrong(p, m), m)


GPIPE_GRID = Exercise(
    chapter=6,
    solution=gpipe_grid,
    expect=_expect_grid,
    route="parlab's schedule, timed and written as text",
    draw=draw,
    cases=(
        Case((1, 1), ([["F1", "B1"]], 0, 1), "one stage, by hand"),
        Case((2, 1), ([["F1", ".", ".", "B1"], [".", "F1", "B1", "."]], 4, 1), "by hand"),
    ),
    misconceptions=(
        Misconception(
            "backward begins with the first micro-batch",
            (_grids(lambda p, m, s, i: m + p - 1 + (p - 1 - s) + i),),
            "This order works too, and takes as long. GPipe goes back through what it computed "
            "last, so that the newest activations are freed first.",
            "Read the last row of the example from right to left.",
        ),
        Misconception(
            "backward goes down the pipeline like forward",
            (
                _grids(lambda p, m, s, i: m + p - 1 + s + (m - 1 - i)),
                _grids(lambda p, m, s, i: m + p - 1 + s + i),
            ),
            "The gradient comes from the loss, behind the last stage, so the last goes first.",
            "Which stage knows the loss?",
        ),
        Misconception(
            "all stages start backward at the same time",
            (_grids(lambda p, m, s, i: m + p - 1 + (m - 1 - i)),),
            "A stage needs the gradient that the stage after it sends.",
            "What does stage 0 wait for?",
        ),
        Misconception(
            "only the forward half is counted",
            (_with_idle(lambda p, m: p * (p - 1)),),
            "The pipeline fills in forward and in backward.",
            "Count the dots in the grid.",
        ),
        Misconception(
            "idle slots of one stage",
            (_with_idle(lambda p, m: 2 * (p - 1)),),
            "Every stage has as many.",
            "Count the dots in all rows.",
        ),
        Misconception(
            "a fraction instead of a count",
            (_with_idle(lambda p, m: (p - 1) / (m + p - 1)),),
            "The exercise asks for the number of idle slots; the fraction is it over all slots.",
            "Count the dots in the grid.",
        ),
        Misconception(
            "the peak of 1F1B",
            (lambda p, m: (*_expect_grid(p, m)[:2], min(p, m)),),
            "GPipe runs all forwards first: every stage then holds all m micro-batches.",
            "How many F has a row before its first B?",
        ),
    ),
    parts=("grid", "idle", "peak"),
)

EXERCISES = (GPIPE_GRID,)
