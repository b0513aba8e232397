"""Exercises of chapter 6: how much of a pipeline's time is idle."""

from parlab.exercises.records import Case, Exercise, Misconception
from parlab.pipeline.schedules import interleaved_1f1b
from parlab.pipeline.timeline import simulate

FEW_ROUNDINGS = "a quotient of small numbers"


def pipeline_bubble(stages, micro_batches):
    """Return the idle fraction of GPipe or 1F1B: idle time over *total* time of all stages.

    Every stage takes the same time for each micro-batch.

    >>> pipeline_bubble(4, 29) == 3 / 32
    True
    """
    return (stages - 1) / (micro_batches + stages - 1)


def bubble_of_ideal(stages, micro_batches):
    """Return the same bubble in the other convention: idle time over *ideal* time.

    The ideal time is that of the work alone, without any waiting.

    >>> bubble_of_ideal(8, 64)
    0.109375
    """
    return (stages - 1) / micro_batches


def interleaved_bubble_fraction(stages, micro_batches, chunks):
    """Return the idle fraction of interleaved 1F1B: idle time over *total* time of all stages.

    The model is cut into stages x chunks equal parts, and each rank has `chunks` of them, so that
    one part takes 1/chunks of the time. stages divides micro_batches.

    >>> interleaved_bubble_fraction(4, 8, 2) == 3 / 19
    True
    """
    return (stages - 1) / (chunks * micro_batches + stages - 1)


# Independent routes: idle time counted.


def _idle_and_busy_cells(stages, micro_batches):
    """Cells of the forward half of a grid, in which stage s is busy from s to s + m - 1."""
    busy = {(s, s + i) for s in range(stages) for i in range(micro_batches)}
    columns = 1 + max(column for _, column in busy)
    return stages * columns - len(busy), len(busy)


def _expect_total(stages, micro_batches):
    idle, busy = _idle_and_busy_cells(stages, micro_batches)
    return idle / (idle + busy)


def _expect_ideal(stages, micro_batches):
    idle, busy = _idle_and_busy_cells(stages, micro_batches)
    return idle / busy


def _expect_interleaved(stages, micro_batches, chunks):
    timeline = simulate(interleaved_1f1b(stages, micro_batches, chunks), forward=1, backward=2)
    return float(timeline.idle_fraction)


def _draw(rng):
    return int(rng.integers(2, 9)), int(rng.integers(1, 20))


def _draw_interleaved(rng):
    p = int(rng.integers(2, 6))
    return p, p * int(rng.integers(1, 4)), int(rng.integers(2, 4))


# Known mistakes, the two conventions first.

OTHER_CONVENTION = Misconception(
    "the other convention: idle over ideal time",
    (lambda p, m, v=1: (p - 1) / (v * m),),
    "(p-1)/m divides the idle time by the time of the work alone. Papers use it too, but it is no "
    "share of the run: for p > m + 1 it passes 1.",
    "Divide by the time that the schedule really takes, from the first to the last action.",
)
COUNTS_STAGES = Misconception(
    "p stages wait, not p - 1",
    (
        lambda p, m, v=1: p / (v * m + p),
        lambda p, m, v=1: p / (v * m + p - 1),
        lambda p, m, v=1: (p - 1) / (v * m + p),
    ),
    "The first stage starts at once, and the last waits for p - 1 others: one step less than there "
    "are stages.",
    "Draw the grid for p = 2 and m = 1.",
)
BUSY = Misconception(
    "the busy share",
    (lambda p, m, v=1: v * m / (v * m + p - 1),),
    "That is the share in which stages work; the bubble is the rest.",
    "What is the bubble of a single stage?",
)
PERCENT = Misconception(
    "percent instead of a fraction",
    (lambda p, m, v=1: 100 * (p - 1) / (v * m + p - 1),),
    "A fraction lies in [0, 1).",
    "Leave the percent to whoever prints the number.",
)
BOTH_HALVES = Misconception(
    "the bubble counts twice",
    (
        lambda p, m, v=1: 2 * (p - 1) / (v * m + p - 1),
        lambda p, m, v=1: 2 * (p - 1) / (v * m + 2 * (p - 1)),
    ),
    "Filling and draining the pipeline both leave p - 1 idle slots, but the work too has two "
    "halves, forward and backward.",
    "Count the columns of the grid as well, in both halves.",
)

PIPELINE_BUBBLE = Exercise(
    chapter=6,
    solution=pipeline_bubble,
    expect=_expect_total,
    route="idle cells counted in a grid",
    draw=_draw,
    cases=(
        Case((1, 1), 0.0, "one stage never waits"),
        Case((4, 1), 0.75, "by hand"),
        Case((4, 29), 3 / 32, "by hand"),
        Case((8, 4), 7 / 11, "GPipe's idle share for p = 8, m = 4: 63.6%"),
        Case((16, 8), 15 / 23, "a fraction, not 15/8"),
    ),
    misconceptions=(OTHER_CONVENTION, COUNTS_STAGES, BUSY, PERCENT, BOTH_HALVES),
    tolerance=1e-9,
    why_tolerance=FEW_ROUNDINGS,
)

BUBBLE_OF_IDEAL = Exercise(
    chapter=6,
    solution=bubble_of_ideal,
    expect=_expect_ideal,
    route="idle cells counted in a grid",
    draw=_draw,
    cases=(
        Case((1, 1), 0.0, "one stage never waits"),
        Case((2, 1), 1.0, "by hand"),
        Case((8, 64), 0.109375, "10.9% idle over ideal"),
    ),
    misconceptions=(
        Misconception(
            "the other convention: idle over total time",
            (lambda p, m: (p - 1) / (m + p - 1),),
            "Total time has the bubble in it. Ideal time is that of the work alone.",
            "How long would one stage take that never waits?",
        ),
        Misconception(
            "p stages wait, not p - 1",
            (lambda p, m: p / m,),
            COUNTS_STAGES.reason,
            COUNTS_STAGES.hint,
        ),
        Misconception(
            "upside down",
            (lambda p, m: m / (p - 1) if p > 1 else 0.0, lambda p, m: m / (p - 1)),
            "More micro-batches make the bubble smaller.",
            "What is the bubble of a single stage?",
        ),
    ),
    tolerance=1e-9,
    why_tolerance=FEW_ROUNDINGS,
)

INTERLEAVED_BUBBLE = Exercise(
    chapter=6,
    solution=interleaved_bubble_fraction,
    expect=_expect_interleaved,
    route="the idle share of a simulated timeline",
    draw=_draw_interleaved,
    cases=(
        Case((1, 4, 2), 0.0, "one stage never waits"),
        Case((2, 2, 1), 1 / 3, "one chunk: plain 1F1B"),
        Case((4, 8, 2), 3 / 19, "torch's interleaved schedule"),
        Case((4, 8, 4), 3 / 35, "torch's interleaved schedule"),
    ),
    misconceptions=(
        Misconception(
            "the whole fraction divided by the chunks",
            (lambda p, m, v: (p - 1) / (m + p - 1) / v,),
            "The idle *time* falls by v, and so does idle over ideal time. But then the total time "
            "is shorter as well, so idle over total falls by less.",
            "Which of idle time and total time gets smaller by v?",
        ),
        OTHER_CONVENTION,
        Misconception(
            "chunks make the pipeline longer",
            (lambda p, m, v: (v * p - 1) / (m + v * p - 1),),
            "There are v p parts, but v of them are on one rank: a rank waits for the p - 1 others "
            "only, and for a part's time, 1/v.",
            "How long does the last rank wait for its first part?",
        ),
        Misconception(
            "the chunks are not used",
            (lambda p, m, v: (p - 1) / (m + p - 1),),
            "That is 1F1B without interleaving.",
            "How long does one part take, if a stage takes 1?",
        ),
        COUNTS_STAGES,
        BUSY,
    ),
    tolerance=1e-9,
    why_tolerance=FEW_ROUNDINGS,
)

EXERCISES = (PIPELINE_BUBBLE, BUBBLE_OF_IDEAL, INTERLEAVED_BUBBLE)
