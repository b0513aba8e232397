"""The ring all-reduce, one step at a time: what every rank holds and what has just moved."""

from functools import lru_cache
from itertools import product

from parlab import svg
from parlab.collectives.cost import traffic
from parlab.collectives.schedules import holdings, ring_all_reduce_schedule
from parlab.panels.panel import Panel, Picture, Slider
from parlab.units import require_int

MOST_RANKS = 8  # more columns are not legible on a phone
# Beside the columns there is room for the chunks' names and for the arrow that closes the ring.
LEFT, RIGHT = 48, svg.WIDTH - 16
TOP, ROWS = 34, 320  # all pictures are equally high: the page around them keeps its layout
HIGHEST_ROW, ROW_GAP = 80, 6
LETTERS = "abcdefgh"


def ring_stepper(n_ranks: int, step: int, shift: int = 0) -> Picture:
    """Draw what every rank holds after `step` steps of a ring all-reduce.

    n_ranks: N, 2 to 8. step: 0 (nothing has moved) to 2(N-1). shift: rank r owns chunk r + shift
    between the two phases; 0 is torch's convention, 1 that of many textbooks.

    >>> print(ring_stepper(3, 1).sentence)
    N = 3 ranks, after step 1 of 4 (reduce-scatter): every rank has passed one partial sum on to the next, which added it. Each rank has sent 1/3 of S so far.
    """  # noqa: E501
    require_int("n_ranks", n_ranks, minimum=2, maximum=MOST_RANKS, why="more cannot be read")
    schedule, states = _run(n_ranks, shift)
    require_int("step", step, minimum=0, maximum=len(schedule.steps), why="a ring has 2(N-1) steps")
    sends = schedule.steps[step - 1] if step else ()
    sentence = _sentence(schedule, step)
    height = TOP + ROWS + 62
    title = f"Ring all-reduce among {n_ranks} ranks, step {step} of {len(schedule.steps)}"
    marks = _marks(n_ranks, states[step], sends)
    described = f"{sentence} {_complete_chunks(states[step])}"
    return Picture(svg.document(height, marks, title, described), sentence)


@lru_cache(maxsize=32)
def _run(n_ranks, shift):
    schedule = ring_all_reduce_schedule(n_ranks, shift=shift)
    return schedule, holdings(schedule)


def _marks(n_ranks, state, sends):
    column = svg.Scale(0, n_ranks, LEFT, RIGHT)
    pitch = column(1) - column(0)
    gap = min(26, max(16, pitch * 0.22))
    cell = pitch - gap
    stripe = cell / n_ranks
    row_height = min(HIGHEST_ROW, ROWS / n_ranks)
    cell_height = row_height - ROW_GAP
    middle = cell_height / 2
    complete = (1 << n_ranks) - 1

    def corner(rank, chunk):
        return column(rank), TOP + chunk * row_height

    copies = list(product(range(n_ranks), repeat=2))  # (rank, chunk)
    parts = {False: [], True: []}  # stripes of partial and of complete copies
    labels = []
    for rank, chunk in copies:
        x, y = corner(rank, chunk)
        held = state[rank][chunk]
        stripes = [(x + part * stripe, y) for part in range(n_ranks) if held >> part & 1]
        parts[held == complete] += stripes
        labels.append(svg.text(x + cell / 2, y + middle + 5, _label(rank, chunk, state), size=14))
    for i in range(n_ranks):
        labels.append(svg.text(column(i) + cell / 2, TOP - 12, _rank(i, n_ranks)))
        labels.append(svg.text(LEFT - gap - 6, corner(0, i)[1] + middle + 5, LETTERS[i]))
    outlines = svg.boxes([corner(*copy) for copy in copies], cell, cell_height)
    arrived = svg.boxes([corner(send.dst, send.chunk) for send in sends], cell, cell_height)
    shafts = _shafts(sends, column, cell, corner, middle)
    return [
        svg.fill(svg.boxes(parts[False], stripe, cell_height), svg.BLUE, 0.3),
        svg.fill(svg.boxes(parts[True], stripe, cell_height), svg.GREEN, 0.45),
        svg.stroke(outlines, width=1, opacity=0.5),
        svg.stroke(arrived, svg.ORANGE, 3),
        svg.stroke(svg.arrows(shafts), svg.ORANGE, 2.5),
        *labels,
        *_legend(TOP + ROWS + 6),
    ]


def _shafts(sends, column, cell, corner, middle):
    """One arrow a message, in the gap before its receiver; the last one re-enters on the left."""
    gap = column(1) - column(0) - cell
    for send in sends:
        y = corner(send.dst, send.chunk)[1] + middle
        if send.dst > send.src:
            yield column(send.src) + cell, column(send.dst) - 2, y
        else:
            yield column(send.src) + cell, column(send.src + 1) - 1, y
            yield column(0) - gap + 2, column(0) - 2, y


def _rank(rank, n_ranks):
    return f"rank {rank}" if n_ranks <= 5 else f"r{rank}"


def _label(rank, chunk, state):
    """The contents of a copy: its terms, or their number where the terms would not fit."""
    n_ranks = len(state)
    terms = [str(part) for part in range(n_ranks) if state[rank][chunk] >> part & 1]
    if len(terms) == n_ranks:
        return f"Σ{LETTERS[chunk]}"
    if n_ranks <= 4:
        return "+".join(LETTERS[chunk] + _subscript(part) for part in terms)
    return f"{len(terms)}/{n_ranks}" if len(terms) > 1 else LETTERS[chunk] + _subscript(terms[0])


def _subscript(digit):
    return "₀₁₂₃₄₅₆₇"[int(digit)]


def _legend(top):
    """Say what stripes, words and outlines mean, so that nothing rests on colour alone."""
    first, second = top + 18, top + 42
    return [
        svg.fill(svg.boxes([(6, first - 13)], 24, 16), svg.BLUE, 0.3),
        svg.stroke(svg.boxes([(6, first - 13)], 36, 16), width=1, opacity=0.5),
        svg.text(50, first, "partial: one stripe per rank", "start", 14),
        svg.fill(svg.boxes([(262, first - 13)], 36, 16), svg.GREEN, 0.45),
        svg.stroke(svg.boxes([(262, first - 13)], 36, 16), width=1, opacity=0.5),
        svg.text(306, first, "Σ complete: all ranks", "start", 14),
        svg.stroke(svg.arrows([(6, 42, second - 5)]), svg.ORANGE, 2.5),
        svg.text(50, second, "moved in this step", "start", 14),
        svg.stroke(svg.boxes([(262, second - 13)], 36, 16), svg.ORANGE, 3),
        svg.text(306, second, "copy that just changed", "start", 14),
    ]


def _sentence(schedule, step):
    n_ranks, last = schedule.n_ranks, len(schedule.steps)
    where = f"N = {n_ranks} ranks, after step {step} of {last}"
    if step == 0:
        return (
            f"N = {n_ranks} ranks, before step 1 of {last}: every rank holds only its own part of "
            f"all {n_ranks} chunks of its tensor of S bytes."
        )
    # In units of one chunk, S/N; a ring loads every rank alike.
    chunks = sum(sent[0] for sent, _ in traffic(schedule, 1).steps[:step])
    sent = f"Each rank has sent {chunks}/{n_ranks} of S so far."
    if step < n_ranks - 1:
        did = "every rank has passed one partial sum on to the next, which added it"
        return f"{where} (reduce-scatter): {did}. {sent}"
    if step == n_ranks - 1:
        did = "the reduce-scatter is done and every rank owns one complete sum"
        return f"{where}: {did}. {sent}"
    if step < last:
        did = "every rank has passed one complete sum on to the next, which keeps it"
        return f"{where} (all-gather): {did}. {sent}"
    return f"{where}: the all-reduce is done and every rank holds every sum. {sent}"


def _complete_chunks(state):
    complete = (1 << len(state)) - 1
    counts = [sum(copy == complete for copy in row) for row in state]
    return "Complete chunks per rank: " + ", ".join(map(str, counts)) + "."


PANEL = Panel(
    name="ring_stepper",
    title="Step through a ring all-reduce",
    function=ring_stepper,
    sliders=(
        Slider("n_ranks", "Ranks N", tuple(range(2, MOST_RANKS + 1)), 4, str, "{} ranks".format),
        Slider(
            "step",
            "Step",
            tuple(range(2 * MOST_RANKS - 1)),
            1,
            str,
            "step {}".format,
            count=lambda values: 2 * values["n_ranks"] - 1,
        ),
    ),
    constants={"shift": 0},
)
