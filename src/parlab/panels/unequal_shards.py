"""Rows that do not divide by the ranks: how far the plain mean of gradients misses the batch's."""

import random
from functools import lru_cache
from itertools import accumulate
from math import fsum
from statistics import median

from parlab import svg
from parlab.panels.panel import Panel, Picture, Slider
from parlab.units import require_int

ROWS = (1, 5, 8, 9, 12, 15, 16, 17, 24, 31, 33, 48, 63, 64, 65, 66, 71, 72, 73, 96, 128, 129, 257)
MOST_ROWS, MOST_RANKS, FEATURES, DRAWS = ROWS[-1], 16, 4, 50
LEFT, RIGHT = 66, svg.WIDTH - 16
TOP, BASE = 58, 176  # of the bars
FIRST_STRIP, STRIPS_END = 258, 330
HEIGHT = STRIPS_END + 50
EXACT = 1e-12  # relative; sums of this length round at 1e-15
SMALLEST, LARGEST = 1e-5, 10.0  # relative errors that the axis shows
ZERO = LEFT + 42  # where the axis, left of its logarithmic part, shows exact results


def unequal_shards(rows: int, n_ranks: int) -> Picture:
    """Draw each rank's share of the rows, and both means' errors over 50 random least squares.

    rows: of the batch, 1 to 257, cut as `np.array_split` cuts. n_ranks: N, 2 to 16; ranks without
    rows contribute a zero gradient. An error is the largest difference to the full batch's
    gradient, relative to that gradient's largest component.

    >>> print(unequal_shards(5, 8).sentence)
    N = 8 ranks, 5 rows, at most 1 on each: the plain mean misses the full-batch gradient by 37.5% of its largest component (median of 50 random draws; worst 37.5%). Weighted by rows it is exact up to rounding.
    """  # noqa: E501
    require_int("rows", rows, minimum=1, maximum=MOST_ROWS)
    require_int("n_ranks", n_ranks, minimum=2, maximum=MOST_RANKS, why="more cannot be read")
    sizes = [rows // n_ranks + (rank < rows % n_ranks) for rank in range(n_ranks)]
    plain, weighted = zip(*(_errors(draw, sizes) for draw in _draws()), strict=True)
    sentence = _sentence(rows, sizes, plain, weighted)
    title = f"{rows} rows on {n_ranks} ranks: error of the plain and of the weighted mean"
    marks = [*_shares(rows, sizes), *_strips(plain, weighted)]
    return Picture(svg.document(HEIGHT, marks, title, sentence), sentence)


@lru_cache(maxsize=1)
def _draws():
    """For every draw and feature the running sums of the rows' gradients x (x'w - y)."""
    # Uniform numbers and exactly rounded sums: the same bytes in every Python, in a browser too.
    uniform = random.Random(0).uniform
    draws = []
    for _ in range(DRAWS):
        w = [uniform(-1, 1) for _ in range(FEATURES)]
        gradients = []
        for _ in range(MOST_ROWS):
            x = [uniform(-1, 1) for _ in range(FEATURES)]
            residual = fsum(a * b for a, b in zip(x, w, strict=True)) - uniform(-1, 1)
            gradients.append([a * residual for a in x])
        columns = zip(*gradients, strict=True)
        draws.append([list(accumulate(column, initial=0.0)) for column in columns])
    return draws


def _errors(draw, sizes):
    """Relative errors of the plain and of the weighted mean of the ranks' gradients."""
    ends = list(accumulate(sizes, initial=0))
    rows, n_ranks = ends[-1], len(sizes)
    off_plain, off_weighted, largest = 0.0, 0.0, 0.0
    for sums in draw:
        full = sums[rows] / rows
        means = [
            (sums[end] - sums[start]) / (end - start) if end > start else 0.0
            for start, end in zip(ends, ends[1:], strict=False)
        ]
        weighted = fsum(size / rows * mean for size, mean in zip(sizes, means, strict=True))
        off_plain = max(off_plain, abs(fsum(means) / n_ranks - full))
        off_weighted = max(off_weighted, abs(weighted - full))
        largest = max(largest, abs(full))
    return off_plain / largest, off_weighted / largest


def _shares(rows, sizes):
    n_ranks = len(sizes)
    x = svg.Scale(0, n_ranks, LEFT, RIGHT)
    y = svg.Scale(0, max(max(sizes) / rows, 1 / n_ranks), BASE, TOP + 20)
    pitch = x(1) - x(0)
    bars = [
        _bar(x(rank) + pitch * 0.15, y(size / rows), pitch * 0.7) for rank, size in enumerate(sizes)
    ]
    line = svg.line([(LEFT, y(1 / n_ranks)), (RIGHT, y(1 / n_ranks))])
    return [
        svg.fill(svg.boxes([(6, 10)], 24, 14), svg.BLUE, 0.45),
        svg.text(36, 22, "share of the rows", "start"),
        svg.stroke(svg.line([(196, 17), (226, 17)]), svg.ORANGE, 3, "9 5"),
        svg.text(232, 22, f"weight in the plain mean: 1/{n_ranks}", "start"),
        svg.fill("".join(bars), svg.BLUE, 0.45),
        svg.stroke(svg.line([(LEFT, BASE), (RIGHT, BASE)]), width=1, opacity=0.6),
        svg.stroke(line, svg.ORANGE, 3, "9 5"),
        *(svg.text(x(rank + 0.5), BASE - 6, str(size), size=14) for rank, size in enumerate(sizes)),
        *(svg.text(x(rank + 0.5), BASE + 18, str(rank), size=14) for rank in range(n_ranks)),
        svg.text(LEFT - 7, BASE - 6, "rows", "end"),
        svg.text(LEFT - 7, BASE + 18, "rank", "end"),
    ]


def _bar(left, top, width):
    return f"M{left:.1f} {BASE:.1f}V{top:.1f}H{left + width:.1f}V{BASE:.1f}Z"


def _strips(plain, weighted):
    x = svg.Scale(SMALLEST, LARGEST, ZERO + 44, RIGHT, log=True)
    middle = {"plain": FIRST_STRIP, "by rows": FIRST_STRIP + 42}
    ticks = [(ZERO, "exact"), *((x(10.0**k), _percent(10.0**k)) for k in (-4, -3, -2, -1, 0))]
    grid = [svg.line([(place, FIRST_STRIP - 20), (place, STRIPS_END)]) for place, _ in ticks]
    marks = [
        svg.text(4, FIRST_STRIP - 32, "error of the mean, one dot for each draw", "start"),
        svg.stroke("".join(grid), width=1, opacity=0.25),
        *(svg.text(place, STRIPS_END + 18, label, size=14) for place, label in ticks),
        svg.text((x.start + x.end) / 2, STRIPS_END + 40, "relative to the largest component"),
    ]
    for (name, y), errors, colour in zip(
        middle.items(), (plain, weighted), (svg.ORANGE, svg.BLUE), strict=True
    ):
        places = [x(min(max(e, SMALLEST), LARGEST)) if e > EXACT else ZERO for e in errors]
        # A dot's height has no meaning: it only keeps dots apart.
        dots = [(place, y + (i * 7 % 11 - 5) * 2) for i, place in enumerate(places)]
        marks.append(svg.text(LEFT - 7, y + 5, name, "end"))
        marks.append(svg.fill(svg.dots(dots, 3), colour, 0.6))
    return marks


def _percent(share):
    return f"{float(f'{100 * share:.3g}'):.12g}%"


def _sentence(rows, sizes, plain, weighted):
    n_ranks = len(sizes)
    if max(sizes) == min(sizes):
        each = f"{sizes[0]} on each"
    elif min(sizes):
        each = f"{min(sizes)} or {max(sizes)} on each"
    else:
        each = f"at most {max(sizes)} on each"
    setting = f"N = {n_ranks} ranks, {rows} {'row' if rows == 1 else 'rows'}, {each}"
    assert max(weighted) < EXACT
    if max(plain) < EXACT:
        return f"{setting}: equal shards, and both means are exact up to rounding."
    return (
        f"{setting}: the plain mean misses the full-batch gradient by {_percent(median(plain))} of "
        f"its largest component (median of {DRAWS} random draws; worst {_percent(max(plain))}). "
        "Weighted by rows it is exact up to rounding."
    )


PANEL = Panel(
    name="unequal_shards",
    title="Rows that do not divide by the ranks",
    function=unequal_shards,
    sliders=(
        Slider(
            "rows",
            "Rows",
            ROWS,
            65,
            str,
            "{} rows".format,
        ),
        Slider("n_ranks", "Ranks N", tuple(range(2, 17)), 8, str, "{} ranks".format),
    ),
)
