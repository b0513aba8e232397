"""Pictures as SVG text: scales, axes and marks, with one path per kind of mark.

Everything is plain string building, because a picture is redrawn at every move of a slider and an
element per mark costs a browser more than the simulation behind it. Ink is `currentColor`, so it
follows the surrounding text in a light or a dark notebook; the book's style sheet may replace the
palette (Okabe and Ito's, told apart by colour-blind readers) through `--parlab-*` properties.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import ceil, floor, log10
from zlib import crc32

WIDTH = 480  # units of the viewBox; a phone shows them at about 0.7 of a pixel
FONT_SIZE = 15
INK = "currentColor"
BLUE = "var(--parlab-blue, #0072b2)"
ORANGE = "var(--parlab-orange, #d55e00)"
GREEN = "var(--parlab-green, #009e73)"
PAPER = "var(--parlab-paper, #ffffff)"  # for words on a mark of one of these colours

Point = tuple[float, float]


@dataclass(frozen=True)
class Scale:
    """Maps a value between `low` and `high` to a position between `start` and `end`.

    With `log` the logarithm of the value is mapped, and `low` must be positive.

    >>> Scale(0, 10, 100, 200)(5)
    150.0
    >>> Scale(1, 100, 0, 80, log=True)(10)
    40.0
    """

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __post_init__(self):
        if not self.low < self.high:
            raise ValueError(f"low must be below high, got {self.low} and {self.high}")
        if self.log and self.low <= 0:
            raise ValueError(f"low must be positive on a log scale, got {self.low}")

    def __call__(self, value: float) -> float:
        if self.log:
            share = log10(value / self.low) / log10(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)


def escape(content: str) -> str:
    """Return text that is safe inside an element or an attribute in double quotes."""
    # html.escape would do, but importing html costs a browser 0.15 s.
    return content.replace("&", "&amp;").replace("<", "&lt;").replace('"', "&quot;")


def decades(low: float, high: float, at_most: int = 5) -> list[float]:
    """Return the powers of ten in [low, high], evenly thinned to `at_most` of them.

    >>> decades(1e3, 1e9)
    [1000.0, 100000.0, 10000000.0, 1000000000.0]
    """
    # log10 of an exact power of ten may be off by one unit in the last place.
    first, last = ceil(log10(low) - 1e-9), floor(log10(high) + 1e-9)
    stride = max(1, ceil((last - first + 1) / at_most))
    return [float(f"1e{exponent}") for exponent in range(first, last + 1, stride)]


def line(points: Iterable[Point]) -> str:
    """Return the path data of a line through the points."""
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)


def boxes(corners: Iterable[Point], width: float, height: float) -> str:
    """Return the path data of equal boxes, given their top left corners."""
    side = f"h{width:.1f}v{height:.1f}h{-width:.1f}z"
    return "".join(f"M{x:.1f} {y:.1f}{side}" for x, y in corners)


def bars(starts: Sequence[float], top: float, length: float, height: float) -> str:
    """Return the path data of equal bars side by side, to be filled.

    Starts are written as they are, so that thousands of bars cost little: `stretched` scales them.
    """
    side = f"h{length:.4g}v{height:.1f}h{-length:.4g}"
    return f"M%.5g {top:.1f}{side}" * len(starts) % tuple(starts)


def arrows(shafts: Iterable[tuple[float, float, float]], head: float = 6) -> str:
    """Return the path data of arrows pointing right, each given as (x of tail, x of tip, y)."""
    return "".join(
        f"M{tail:.1f} {y:.1f}H{tip:.1f}m{-head:.1f} {-head:.1f}l{head:.1f} {head:.1f}"
        f"l{-head:.1f} {head:.1f}"
        for tail, tip, y in shafts
    )


def dots(centres: Iterable[Point], radius: float = 5) -> str:
    """Return the path data of equal discs."""
    arc = f"a{radius} {radius} 0 1 0"
    return "".join(
        f"M{x - radius:.1f} {y:.1f}{arc} {2 * radius} 0{arc} {-2 * radius} 0" for x, y in centres
    )


def stroke(data: str, colour: str = INK, width: float = 2, dash: str = "", opacity: float = 1):
    """Return one path that is drawn as a line; nothing for empty path data."""
    dashes = f' stroke-dasharray="{dash}"' if dash else ""
    fade = f' stroke-opacity="{opacity}"' if opacity != 1 else ""
    # A property with var() is only safe in a style, not in a presentation attribute.
    style = f'style="fill:none;stroke:{colour}" stroke-width="{width}"'
    return f'<path d="{data}" {style}{dashes}{fade}/>' if data else ""


def fill(data: str, colour: str = INK, opacity: float = 1):
    """Return one path that is filled; nothing for empty path data."""
    fade = f' fill-opacity="{opacity}"' if opacity != 1 else ""
    return f'<path d="{data}" style="fill:{colour}"{fade}/>' if data else ""


def stretched(marks: Iterable[str], left: float, scale: float) -> str:
    """Return marks whose horizontal positions are not yet scaled: x becomes left + scale x."""
    return f'<g transform="translate({left:g} 0) scale({scale:.6g} 1)">{"".join(marks)}</g>'


def text(
    x: float,
    y: float,
    content: str,
    anchor: str = "middle",
    size: float = FONT_SIZE,
    colour: str = INK,
) -> str:
    """Return a line of text whose baseline is at y; `anchor` is start, middle or end."""
    size_attribute = f' font-size="{size}"' if size != FONT_SIZE else ""
    style = f' style="fill:{colour}"' if colour != INK else ""
    position = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f"<text {position}{size_attribute}{style}>{escape(content)}</text>"


def axes(
    x: Scale,
    y: Scale,
    x_ticks: Sequence[tuple[float, str]],
    y_ticks: Sequence[tuple[float, str]],
    x_title: str,
    y_title: str,
) -> str:
    """Return grid lines, tick labels and titles for two scales; a tick is (value, label)."""
    columns = [line([(x(value), y.start), (x(value), y.end)]) for value, _ in x_ticks]
    rows = [line([(x.start, y(value)), (x.end, y(value))]) for value, _ in y_ticks]
    frame = line([(x.start, y.end), (x.start, y.start), (x.end, y.start)])
    labels = [text(x(value), y.start + 20, label) for value, label in x_ticks]
    labels += [text(x.start - 7, y(value) + 5, label, "end") for value, label in y_ticks]
    return "".join(
        [
            stroke("".join(columns + rows), width=1, opacity=0.18),
            stroke(frame, width=1, opacity=0.6),
            *labels,
            text((x.start + x.end) / 2, y.start + 42, x_title),
            text(4, y.end - 12, y_title, "start"),
        ]
    )


def document(height: float, marks: Iterable[str], title: str, description: str) -> str:
    """Return the whole picture, WIDTH by `height` units, as wide as its place and no wider.

    `title` and `description` are what a screen reader says. Their ids are derived from the
    content, so equal pictures are equal byte for byte and different ones never share an id.
    """
    body = "".join(marks)
    name = f"parlab-{crc32((title + description + body).encode()):08x}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="parlab-svg" role="img" '
        f'viewBox="0 0 {WIDTH} {height:g}" aria-labelledby="{name}-title {name}-text" '
        f'font-family="system-ui, sans-serif" font-size="{FONT_SIZE}" fill="{INK}" '
        f'style="display:block;width:100%;max-width:600px;height:auto">'
        f'<title id="{name}-title">{escape(title)}</title>'
        f'<desc id="{name}-text">{escape(description)}</desc>{body}</svg>'
    )
