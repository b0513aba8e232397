"""A pipeline schedule: what ranks run when, how long they wait, and what they hold.

Each simulated figure stands beside its formula, where there is one. Times are seconds,
or any unit of your own.
"""

from textwrap import fill

from parlab.cli.grid import MOST_LINES, WIDTH, wrapped_grid
from parlab.pipeline.bubble import pipeline_bubble, pipeline_bubble_seconds
from parlab.pipeline.schedules import gpipe, interleaved_1f1b, one_f_one_b
from parlab.pipeline.timeline import CONVENTIONS, simulate
from parlab.pipeline.zero_bubble import zero_bubble_h1, zero_bubble_h2, zero_bubble_v
from parlab.table import print_table
from parlab.units import require_choice, require_int

SCHEDULES = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": interleaved_1f1b,
    "zb-h1": zero_bubble_h1,
    "zb-h2": zero_bubble_h2,
    "zb-v": zero_bubble_v,
}
_ZERO_BUBBLE = {
    "ZB-H1": ("x = (p-1) (F + max(I-W, 0))", "(p-1) (F + I - W)"),
    "ZB-H2": ("x = (p-1) (F + max(I-2W, 0))", "(p-1) (F + I - 2W)"),
    "ZB-V": ("x = (p-1) F", "0"),
}
MOST_PASSES = 100_000
HELP = "what pipeline ranks run when, how long they wait, what they hold"
EPILOG = f"""\
example:
  parlab schedule interleaved 4 8 2 --backward 2.5

--json prints:
  schedule, ranks, micro_batches, chunks
  makespan_s          from the first start to the last end
  idle                fractions, simulated and by formula (null where there is none):
                      total, over all rank-time; ideal, over the time of the work;
                      span, between each rank's own first and last action
  longest_idle_s      of one rank, simulated and by formula: total and span
  formula_fails       why there is no formula, or null
  idle_s              of each rank
  peak_in_flight      of each rank; a micro-batch counts for each chunk it has passed
  peak_micro_batches  of each rank
  slot_s, grid        seconds of a column, and lines of text; null beyond {MOST_LINES} lines,
                      or where times have no common unit
"""


def add_arguments(parser):
    """Add the options; numbers are checked by the functions that use them."""
    add = parser.add_argument
    add("name", metavar="NAME", help=", ".join(SCHEDULES))
    add("p", type=int, help="ranks")
    add("m", type=int, help="micro-batches")
    add("v", type=int, nargs="?", help="chunks of a rank: interleaved only (zb-v has 2)")
    add("--forward", type=float, default=1.0, metavar="S", help="through one stage (1)")
    add("--backward", type=float, metavar="S", help="through one stage (2)")
    add("--input-gradient", type=float, metavar="S", help="part of backward (half)")
    add("--weight-gradient", type=float, metavar="S", help="the other part (half)")
    add("--transfer", type=float, default=0.0, metavar="S", help="from rank to rank (0)")


def answer(chosen):
    """Return what --json prints."""
    schedule = _build(require_choice("NAME", chosen.name, SCHEDULES), chosen)
    times = {"forward": chosen.forward}
    for name in ("backward", "input_gradient", "weight_gradient"):
        if getattr(chosen, name) is not None:
            times[name] = getattr(chosen, name)
    if len(times) == 1:
        times["backward"] = 2.0
    timeline = simulate(schedule, **times, transfer=chosen.transfer)
    fractions, seconds, fails = _formulas(timeline, chosen.transfer)
    longest = {"total": max(timeline.idle), "span": max(timeline.idle_in_span)}
    slot, grid = wrapped_grid(timeline, chosen.transfer)
    return {
        "schedule": schedule.name,
        "ranks": schedule.p,
        "micro_batches": schedule.m,
        "chunks": schedule.v,
        "makespan_s": timeline.makespan,
        "idle": {
            of: {"simulated": timeline.bubble(of), "formula": fractions.get(of)}
            for of in CONVENTIONS
        },
        "longest_idle_s": {
            of: {"simulated": idle, "formula": seconds.get(of)} for of, idle in longest.items()
        },
        "formula_fails": fails,
        "idle_s": timeline.idle,
        "peak_in_flight": timeline.peak_in_flight,
        "peak_micro_batches": timeline.peak_micro_batches,
        "slot_s": slot,
        "grid": grid,
    }


def show(answer):
    """Print the grid, then idle time beside its formula, then each rank."""
    counts = (answer[key] for key in ("schedule", "ranks", "micro_batches", "chunks"))
    print("{}: {} ranks, {} micro-batches, chunks of a rank: {}\n".format(*counts))
    if answer["grid"]:
        print(*answer["grid"], f"\na column is {_seconds(answer['slot_s'])}", sep="\n")
    else:
        print("no grid: too long, or times without a common unit")
    rows = [
        (f"over {over}", *map(_percent, answer["idle"][of].values()))
        for of, over in (("total", "all time"), ("ideal", "the work"), ("span", "ranks' spans"))
    ]
    rows += [
        (f"longest, {where}", *map(_seconds, answer["longest_idle_s"][of].values()))
        for of, where in (("total", "of one rank"), ("span", "in its span"))
    ]
    written = _written(*(answer[key] for key in ("schedule", "ranks", "micro_batches", "chunks")))
    shown = ((*row, text if row[2] != "-" else "") for row, text in zip(rows, written, strict=True))
    print()
    print_table(("idle", "simulated", "formula", ""), shown)
    if answer["formula_fails"]:
        print(fill(f"no formula: {answer['formula_fails']}", WIDTH))
    print(f"\nmakespan {_seconds(answer['makespan_s'])}")
    per_rank = zip(
        map(str, range(answer["ranks"])),
        map(_seconds, answer["idle_s"]),
        answer["peak_in_flight"],
        answer["peak_micro_batches"],
        strict=True,
    )
    print_table(("rank", "idle", "peak in flight", "peak micro-batches"), per_rank)


def _build(name, chosen):
    """Make the schedule; only one of them has a number of chunks to choose."""
    p, m, v = chosen.p, chosen.m, chosen.v
    chunks = {"interleaved": v, "zb-v": 2}.get(name, 1)
    if chunks is None:
        raise ValueError("v must be given for interleaved: the chunks of each rank")
    if v is not None and name != "interleaved":
        require_int("v", v, minimum=chunks, maximum=chunks, why=f"{name} has so many")
    if p * m * chunks > MOST_PASSES:
        raise ValueError(
            f"p x m x v must be at most {MOST_PASSES}, got {p} x {m} x {chunks}: more take up to "
            "minutes, and parlab.pipeline_bubble has formulas for any size"
        )
    return SCHEDULES[name](p, m, v) if name == "interleaved" else SCHEDULES[name](p, m)


def _formulas(timeline, transfer):
    """Return fractions and seconds by convention, and why there are none."""
    if transfer:
        return {}, {}, "it assumes messages that take no time"
    schedule = timeline.schedule
    p, m, v = schedule.p, schedule.m, schedule.v
    f, i, w = (timeline.times[kind][0] for kind in "FIW")
    times = {"input_gradient": i, "weight_gradient": w}
    try:
        seconds = {
            of: pipeline_bubble_seconds(schedule.name, p, m, f, **times, chunks=v, of=of)
            for of in ("total", "span")
        }
    except ValueError as error:
        return {}, {}, str(error)
    if not schedule.name.startswith("ZB"):
        return {of: pipeline_bubble(p, m, v, of=of) for of in CONVENTIONS}, seconds, None
    work = v * m * (f + i + w)
    x = seconds["total"]
    return {"total": x / (work + x), "ideal": x / work}, seconds, None


def _written(name, p, m, v):
    """The formulas of the five rows of idle time."""
    if name in _ZERO_BUBBLE:
        work = "2 m (F+I+W)" if v == 2 else "m (F+I+W)"
        return f"x / (x + {work})", f"x / ({work})", "", *_ZERO_BUBBLE[name]
    idle, twice = ("p-1", "p-1") if v == 1 or m >= p else ("p-1+e", "p-1+2e")
    vm = "m" if v == 1 else "v m"
    longest = f"({idle}) (F+B)" + ("" if idle == "p-1" else ", e = (v-1) (p-m)")
    ideal = f"({idle}) / m" if v == 1 else f"({idle}) / (v m)"
    return f"({idle}) / ({vm} + {idle})", ideal, f"({twice}) / (2 {vm} + {twice})", longest, longest


def _percent(fraction):
    return "-" if fraction is None else f"{round(100 * fraction, 9):.4g}%"


def _seconds(seconds):
    return "-" if seconds is None else f"{seconds:.6g} s"
