"""A pipeline schedule as a Gantt chart, with each rank's idle time and peak, and the formula."""

from functools import lru_cache

from parlab import svg
from parlab.panels.gantt import BOTTOM, KINDS, LEFT, SHADES, TOP, Gantt, percent
from parlab.panels.panel import Panel, Picture, Pointed, Slider
from parlab.panels.pointing import point_at, step_to
from parlab.pipeline import actions
from parlab.pipeline.bubble import SCHEDULES, pipeline_bubble_seconds
from parlab.pipeline.schedules import gpipe, interleaved_1f1b, one_f_one_b
from parlab.pipeline.timeline import simulate
from parlab.pipeline.zero_bubble import zero_bubble_h1, zero_bubble_h2, zero_bubble_v
from parlab.units import require_choice, require_int, require_number

INTERLEAVED = "interleaved 1F1B"
MAKERS = {
    "GPipe": gpipe,
    "1F1B": one_f_one_b,
    INTERLEAVED: interleaved_1f1b,
    "ZB-H1": zero_bubble_h1,
    "ZB-H2": zero_bubble_h2,
    "ZB-V": zero_bubble_v,
}
FORMULAS = {  # idle of total, for I = W = B/2
    "GPipe": "(p−1) / (m + p−1)",
    "1F1B": "(p−1) / (m + p−1)",
    INTERLEAVED: "(p−1) / (v m + p−1)",
    "ZB-H1": "(p−1) F / (m (F+B) + (p−1) F)",
    "ZB-H2": "(p−1) F / (m (F+B) + (p−1) F)",
    "ZB-V": "(p−1) F / (2 m (F+B) + (p−1) F)",
}
FEW = "(p−1+e) / (v m + p−1+e), e = (v−1)(p−m)"  # interleaved, where m < p
NEEDS = {  # besides equal ranks and free messages
    "ZB-H1": ("m ≥ p", "B ≤ 2 F"),
    "ZB-H2": ("m ≥ 2p−1", "B ≤ 2 F"),
    "ZB-V": ("m ≥ 2p−1", "B = 2 F"),
}
MOST_RANKS = 16
SLOWNESS = 1.5
M = (1, 2, 3, 4, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64)
V = (1, 2, 3, 4)
B = (1, 1.5, 2, 2.5, 3)
TRANSFERS = (0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1)
BAR, BAR_LENGTH = 84, 220  # of 0 to 100% below the chart
HEIGHT = BOTTOM + 142


def pipeline_schedule(
    schedule: str,
    p: int,
    m: int,
    v: int,
    backward: float,
    transfer: float,
    slow_rank: int,
    slowness: float = SLOWNESS,
) -> Picture:
    """Draw when each rank runs what, its idle time and its peak, and the idle time by formula.

    Times are in F, a rank's forward pass of one micro-batch. A chunk has 1/v of a rank's layers and
    takes 1/v of the time, so that all schedules train the same model. I and W are half of B each.

    schedule: a name from MAKERS. p, m: ranks, up to 16, and micro-batches, up to 64. v: chunks of
    interleaved 1F1B, up to 4; 1 for all others, though ZB-V always has 2. backward: B. transfer:
    from the end of an action until its output is on another rank. slow_rank: the one that takes
    `slowness` times as long, -1 for none.

    >>> print(pipeline_schedule("1F1B", 8, 16, 1, 2, 0, -1).sentence)
    p = 8 ranks, m = 16, v = 1, 1F1B: makespan 69 F, idle 30.4% of total (43.8% of ideal). Formula: 30.4% of total. Peak on rank 0: 8 micro-batches.
    """  # noqa: E501
    schedule = require_choice("schedule", schedule, MAKERS)
    gantt = _gantt(schedule, p, m, v, backward, transfer, slow_rank, slowness)
    timeline = gantt.timeline
    formula = _formula(timeline.schedule, backward)
    equal = transfer == 0 and (slow_rank < 0 or slowness == 1)
    setting = f"p = {p} {'ranks' if p > 1 else 'rank'}, m = {m}, v = {timeline.schedule.v}"
    slow = f", rank {slow_rank} slow" if slow_rank >= 0 else ""
    sentence = f"{setting}, {schedule}{slow}: {_sentence(timeline, formula, equal)}"
    marks = [
        *_legend(timeline.schedule),
        *gantt.marks(),
        *gantt.columns(),
        *gantt.axis(),
        *_comparison(timeline, formula, equal),
    ]
    title = f"Gantt chart of {schedule} with {m} micro-batches on {p} ranks"
    return Picture(svg.document(HEIGHT, marks, title, sentence), sentence)


def pointed_action(where: dict, **values) -> Pointed:
    """Name what a reader points at in the picture of the same values; see `Panel.point`.

    >>> values = PANEL.values(schedule="GPipe", p=4, m=4)
    >>> pointed_action({"at": (0, 2), "keys": ["ArrowDown", "ArrowRight"]}, **values).label
    'Rank 1, F3: forward of micro-batch 3, from 3 to 4 F. In flight on it: 3 micro-batches (1–3).'
    """
    gantt = _gantt(**values)
    if "keys" in where:
        return step_to(gantt, where["at"], where["keys"])
    return point_at(gantt, where["x"], where["y"])


@lru_cache(maxsize=16)
def _gantt(schedule, p, m, v, backward, transfer, slow_rank, slowness=SLOWNESS):
    made = _schedule(schedule, p, m, v)
    require_int("slow_rank", slow_rank, minimum=-1, maximum=p - 1, why="-1 stands for none")
    require_number("slowness", slowness, minimum=1)
    forward = [1 / made.v] * p
    if slow_rank >= 0:
        forward[slow_rank] *= slowness
    timeline = simulate(made, forward, [backward * each for each in forward], transfer=transfer)
    equal_1f1b = (m + p - 1) * (1 + backward)
    return Gantt(timeline, max(timeline.makespan, equal_1f1b))


@lru_cache(maxsize=16)
def _schedule(name, p, m, v):
    require_int("p", p, minimum=1, maximum=MOST_RANKS, why="more cannot be read")
    require_int("m", m, minimum=1, maximum=M[-1], why="more cannot be read")
    if name == INTERLEAVED:
        return interleaved_1f1b(p, m, require_int("v", v, minimum=1, maximum=V[-1]))
    require_int("v", v, minimum=1, maximum=1, why=f"{name} leaves no choice")
    return MAKERS[name](p, m)


def _formula(made, backward):
    """Idle of total for equal ranks and free messages, or None where the formula needs more."""
    sizes, each = (made.name, made.p, made.m), (1 / made.v, backward / made.v)
    try:
        idle = pipeline_bubble_seconds(*sizes, *each, chunks=made.v)
    except ValueError:
        return None
    return idle / (made.m * (1 + backward) + idle)


def _sentence(timeline, formula, equal):
    name, v = timeline.schedule.name, timeline.schedule.v
    trust = ": trust the simulation"
    if formula is None:
        beside = f"The formula needs {' and '.join(NEEDS[name])}{trust}"
    elif equal:
        beside = f"Formula: {percent(formula)} of total"
    else:
        beside = f"Formula: {percent(formula)}, for equal ranks, free messages{trust}"
    peak = timeline.peak_in_flight[0]
    held = f"{peak / v:.4g} micro-batch{'es' if peak > v else ''}"
    if v > 1:
        held = f"{peak} chunks = {held}"
    return (
        f"makespan {timeline.makespan:.4g} F, idle {percent(timeline.bubble())} of total "
        f"({percent(timeline.bubble('ideal'))} of ideal). {beside}. Peak on rank 0: {held}."
    )


def _legend(schedule):
    split = any(action.kind == "I" for action in schedule.actions[0])
    x = 4
    for kind in "FIW" if split else "FB":
        colour, upper, lower = KINDS[kind]
        word = f"{kind} {actions.KINDS[kind]}"
        yield svg.fill(
            svg.boxes([(x, 6 + 15 * upper)], 15, 15 * (lower - upper)), colour, SHADES[0]
        )
        yield svg.text(x + 21, 19, word, "start", 14)
        x += 36 + 7.8 * len(word)
    if schedule.v > 1:
        yield svg.text(LEFT, TOP - 8, "strong: chunk 1, faint: later chunks", "start", 14)


def _comparison(timeline, formula, equal):
    """Idle time of total as simulated and by the formula, with what the formula needs."""
    schedule = timeline.schedule
    first, second = BOTTOM + 66, BOTTOM + 90
    simulated = timeline.bubble()
    yield from _bar(first, "simulated", simulated, f"{percent(simulated)} idle of total")
    if formula is None:
        yield from _bar(second, "formula", 0, "does not hold")
    elif equal:
        yield from _bar(second, "formula", formula, f"{percent(formula)}, it holds")
    else:
        said = f"{percent(formula)}, does not hold"
        yield from _bar(second, "formula", formula, said, sure=False)
    few = schedule.name == INTERLEAVED and schedule.m < schedule.p
    law = FEW if few else FORMULAS[schedule.name]
    needs = ", ".join(["equal ranks", "free messages", *NEEDS.get(schedule.name, ())])
    yield svg.text(4, BOTTOM + 114, f"formula: {law}", "start", 14)
    yield svg.text(4, BOTTOM + 134, f"needs {needs}", "start", 14)


def _bar(y, name, share, said, sure=True):
    """A share of 100%, filled, or dashed where it is not `sure`."""
    box = svg.boxes([(BAR, y - 12)], share * BAR_LENGTH, 15)
    yield svg.fill(svg.boxes([(BAR, y - 12)], BAR_LENGTH, 15), svg.INK, 0.08)
    yield svg.fill(box, svg.INK, 0.6) if sure else svg.stroke(box, svg.INK, 1.5, "3 3")
    yield svg.text(4, y, name, "start", 14)
    yield svg.text(BAR + BAR_LENGTH + 8, y, said, "start", 14)


def _short(schedule):
    return "interleaved" if schedule == INTERLEAVED else schedule


def _in_f(times):
    return f"{times:g} F"


def _spoken_in_f(times):
    return f"{times:g} times a forward pass"


def _rank(rank):
    return f"rank {rank}" if rank >= 0 else "none"


def _rank_count(values):
    return values["p"] + 1


def _chunk_count(values):
    return len(V) if values["schedule"] == INTERLEAVED else 1


PANEL = Panel(
    name="pipeline_schedule",
    title="A pipeline schedule: idle time and peaks, beside the formula",
    function=pipeline_schedule,
    sliders=(
        Slider("schedule", "Schedule", SCHEDULES, "1F1B", _short, str),
        Slider("p", "Ranks p", tuple(range(2, MOST_RANKS + 1)), 4, str, "{} ranks".format),
        Slider("m", "Micro-batches", M, 8, str, "{} micro-batches".format),
        Slider("v", "Interleaved v", V, 1, str, "{} chunks a rank".format, _chunk_count),
        Slider("backward", "Backward B", B, 2, _in_f, _spoken_in_f),
        Slider("transfer", "Transfer", TRANSFERS, 0, _in_f, _spoken_in_f),
        Slider(
            "slow_rank", "Slow rank", tuple(range(-1, MOST_RANKS)), -1, _rank, _rank, _rank_count
        ),
    ),
    constants={"slowness": SLOWNESS},
    point=pointed_action,
    hint="Point at an action to name it, or give the chart the focus and use the arrow keys.",
)
