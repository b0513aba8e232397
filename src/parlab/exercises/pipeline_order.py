"""The exercise of chapter 6 on the order of 1F1B, and what each stage holds at most."""

from parlab.exercises.records import Case, Exercise, Misconception
from parlab.pipeline.actions import short_name
from parlab.pipeline.schedules import one_f_one_b as schedule_1f1b
from parlab.pipeline.timeline import simulate


def one_f_one_b(stages, micro_batches):
    """Return the order of 1F1B, and how many micro-batches each stage holds at most.

    Stage s of p starts with p - 1 - s forward passes, or with all there are if they are fewer. Then
    it alternates one forward and one backward, and ends with the backwards that are left. A
    micro-batch is held from its forward to the end of its backward.

    Returns (orders, peaks): for each stage a list of names, numbered from 1, and a number.

    >>> orders, peaks = one_f_one_b(2, 3)
    >>> orders[0]
    ['F1', 'F2', 'B1', 'F3', 'B2', 'B3']
    >>> orders[1], peaks
    (['F1', 'B1', 'F2', 'B2', 'F3', 'B3'], [2, 1])
    """
    p, m = stages, micro_batches  # given
    orders, peaks = [], []  # given
    for stage in range(p):
        ahead = min(p - 1 - stage, m)
        order = [f"F{i + 1}" for i in range(ahead)]
        for i in range(m):
            if ahead + i < m:
                order.append(f"F{ahead + i + 1}")
            order.append(f"B{i + 1}")
        orders.append(order)
        peaks.append(min(ahead + 1, m))
    return orders, peaks  # given


# Independent routes: parlab's schedules, timed.


def _names(schedule):
    return [[short_name(action) for action in row] for row in schedule.actions]


def _expect_1f1b(stages, micro_batches):
    schedule = schedule_1f1b(stages, micro_batches)
    return _names(schedule), list(simulate(schedule).peak_in_flight)


def draw(rng):
    return int(rng.integers(2, 6)), int(rng.integers(1, 9))


# Known mistakes.


def _all(kind, m):
    return [f"{kind}{i + 1}" for i in range(m)]


def _order(p, m, ahead):
    """1F1B with another number of forwards ahead on each stage."""
    orders = []
    for stage in range(p):
        forwards, backwards = _all("F", m), _all("B", m)
        first = min(ahead(p, stage), m)
        order = forwards[:first]
        for f, b in zip(forwards[first:], backwards, strict=False):
            order += [f, b]
        orders.append(order + backwards[m - first :])
    return orders


def _orders(wrong):
    return lambda p, m: (wrong(p, m), _expect_1f1b(p, m)[1])


def _with_peaks(wrong_order, peak):
    """A wrong order, with the peaks that it has or with those of 1F1B."""
    return (
        _orders(wrong_order),
        lambda p, m: (wrong_order(p, m), [peak(p, m, s) for s in range(p)]),
    )


def _peaks(wrong):
    return lambda p, m: (_expect_1f1b(p, m)[0], [wrong(p, m, s) for s in range(p)])


def _gpipe_last_first(p, m):
    return [_all("F", m) + _all("B", m)[::-1] for _ in range(p)]


def _gpipe_first_first(p, m):
    return [_all("F", m) + _all("B", m) for _ in range(p)]


def _not_clipped(p, m):
    orders = _order(p, m, lambda p, s: p - 1 - s)
    for stage, order in enumerate(orders):
        if p - 1 - stage > m:
            order[:m] = _all("F", p - 1 - stage)
    return orders


ONE_F_ONE_B = Exercise(
    chapter=6,
    solution=one_f_one_b,
    expect=_expect_1f1b,
    route="parlab's schedule, and the peak of its simulated timeline",
    draw=draw,
    cases=(
        Case((1, 2), ([["F1", "B1", "F2", "B2"]], [1]), "one stage, by hand"),
        Case((2, 1), ([["F1", "B1"]] * 2, [1, 1]), "one micro-batch, by hand"),
        Case(
            (2, 3),
            ([["F1", "F2", "B1", "F3", "B2", "B3"], ["F1", "B1", "F2", "B2", "F3", "B3"]], [2, 1]),
            "by hand",
        ),
    ),
    misconceptions=(
        Misconception(
            "GPipe's order",
            _with_peaks(_gpipe_last_first, lambda p, m, s: m)
            + _with_peaks(_gpipe_first_first, lambda p, m, s: m),
            "All forwards before all backwards keeps m micro-batches alive. 1F1B starts each "
            "backward as soon as it can.",
            "What can the last stage do right after its first forward?",
        ),
        Misconception(
            "one forward too many ahead",
            _with_peaks(
                lambda p, m: _order(p, m, lambda p, s: p - s), lambda p, m, s: min(p - s + 1, m)
            ),
            "With p - s forwards ahead and then a forward first, each stage holds one micro-batch "
            "more than it must.",
            "How many forwards does the last stage need before its first backward?",
        ),
        Misconception(
            "all stages are equally far ahead",
            _with_peaks(lambda p, m: _order(p, m, lambda p, s: p - 1), lambda p, m, s: min(p, m)),
            "Only the first stage has p - 1 others behind it. The last can go back at once.",
            "How does the number of forwards ahead depend on the stage?",
        ),
        Misconception(
            "no forwards ahead",
            _with_peaks(lambda p, m: _order(p, m, lambda p, s: 0), lambda p, m, s: 1),
            "The first stage then waits for the backward of its first micro-batch before it sends "
            "the second: one micro-batch at a time goes through the pipeline.",
            "What keeps the last stage busy while the first waits?",
        ),
        Misconception(
            "more forwards ahead than there are micro-batches",
            (_orders(_not_clipped),),
            "With few micro-batches the early stages run out of them.",
            "Try p = 4 and m = 1.",
        ),
        Misconception(
            "the peak is m",
            (_peaks(lambda p, m, s: m),),
            "That is GPipe's. In 1F1B a backward frees a micro-batch before the next forward.",
            "Count along the order of the last stage.",
        ),
        Misconception(
            "the same peak on all stages",
            (_peaks(lambda p, m, s: min(p, m)),),
            "Stage s is p - 1 - s forwards ahead, so it holds at most p - s.",
            "Count along the order of the last stage.",
        ),
        Misconception(
            "the peak passes m",
            (_peaks(lambda p, m, s: p - s),),
            "With fewer micro-batches than stages nobody can hold p - s of them.",
            "Try p = 4 and m = 1.",
        ),
        Misconception(
            "the micro-batch at work is not counted",
            (_peaks(lambda p, m, s: min(p - 1 - s, m)),),
            "At the peak a stage holds those that it is ahead, and the one it has just taken.",
            "What does the last stage hold during its backward?",
        ),
    ),
    parts=("orders", "peaks"),
)

EXERCISES = (ONE_F_ONE_B,)
