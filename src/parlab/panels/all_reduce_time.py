"""Time of an all-reduce against the size of its message: three algorithms and where they cross."""

from parlab import svg
from parlab.collectives.cost import all_reduce_cost, ring_tree_crossover_bytes
from parlab.hardware import Link
from parlab.panels.panel import Panel, Picture, Slider
from parlab.units import format_bytes, format_rate, format_seconds, require_int

SIZES = [10 ** (3 + quarter / 4) for quarter in range(33)]  # bytes, four a decade
SMALLEST, LARGEST = SIZES[0], SIZES[-1]
HEIGHT, TOP, BOTTOM, LEFT, RIGHT = 380, 64, 320, 66, svg.WIDTH - 32
ALGORITHMS = {  # name in cost.py: (name in the picture, colour, dashes)
    "ring": ("ring", svg.BLUE, ""),
    "tree": ("tree (pipelined)", svg.ORANGE, "9 5"),
    "halving_doubling": ("halving-doubling", svg.GREEN, "2 4"),
}


def all_reduce_time(n_ranks: int, latency_us: float, bandwidth_GB_s: float) -> Picture:
    """Draw the time of an all-reduce for messages of 1 KB to 100 GB, both axes logarithmic.

    n_ranks: N. latency_us: alpha, microseconds per message. bandwidth_GB_s: B, one direction.

    >>> print(all_reduce_time(64, 5, 50).sentence)
    N = 64 ranks on links of 5 µs and 50 GB/s: the tree is faster below 912 MB, the ring above; there both take 36.5 ms.
    """  # noqa: E501
    require_int("n_ranks", n_ranks, minimum=2, why="one rank has nobody to reduce with")
    link = Link(latency_us * 1e-6, bandwidth_GB_s * 1e9)
    curves = {
        name: [all_reduce_cost(n_ranks, size, link, name).seconds for size in SIZES]
        for name in ALGORITHMS
    }
    crossover = ring_tree_crossover_bytes(n_ranks, link)
    sentence = _sentence(n_ranks, link, crossover)
    everything = [seconds for curve in curves.values() for seconds in curve]
    x = svg.Scale(SMALLEST, LARGEST, LEFT, RIGHT, log=True)
    y = svg.Scale(min(everything) / 1.5, max(everything) * 1.5, BOTTOM, TOP, log=True)
    marks = [
        svg.axes(
            x,
            y,
            [(size, format_bytes(size)) for size in svg.decades(SMALLEST, LARGEST)],
            [(seconds, format_seconds(seconds)) for seconds in svg.decades(y.low, y.high, 6)],
            "size S of the message",
            "time",
        ),
        *(
            svg.stroke(
                svg.line(zip(map(x, SIZES), map(y, curves[name]), strict=True)), colour, 3, dash
            )
            for name, (_, colour, dash) in ALGORITHMS.items()
        ),
        _crossover_mark(x, y, crossover, n_ranks, link),
        _legend(),
    ]
    title = f"All-reduce time against message size, {n_ranks} ranks"
    return Picture(svg.document(HEIGHT, marks, title, sentence), sentence)


def _crossover_mark(x, y, crossover, n_ranks, link):
    if not SMALLEST < crossover < LARGEST:
        return ""
    place = x(crossover)
    seconds = all_reduce_cost(n_ranks, crossover, link).seconds
    anchor, shift = ("end", -8) if place > (LEFT + RIGHT) / 2 else ("start", 8)
    return (
        svg.stroke(svg.line([(place, BOTTOM), (place, TOP)]), svg.INK, 1.5, "4 4", 0.7)
        + svg.fill(svg.dots([(place, y(seconds))]))
        + svg.text(place + shift, TOP + 18, f"crossover {format_bytes(crossover)}", anchor)
    )


def _legend():
    marks, left = [], 6
    for name, colour, dash in ALGORITHMS.values():
        marks.append(svg.stroke(svg.line([(left, 18), (left + 32, 18)]), colour, 3, dash))
        marks.append(svg.text(left + 38, 23, name, "start"))
        left += 62 + 7.6 * len(name)
    return "".join(marks)


def _sentence(n_ranks, link, crossover):
    setting = (
        f"N = {n_ranks} ranks on links of {format_seconds(link.latency_s)} "
        f"and {format_rate(link.bandwidth_bytes_per_s)}"
    )
    if crossover <= 0:
        return (
            f"{setting}: no crossover, the ring is never slower than the tree; "
            f"a message of 1 GB takes it {_time(n_ranks, 1e9, link)}."
        )
    if crossover <= SMALLEST:
        beyond = ", left of this picture"
    elif crossover >= LARGEST:
        beyond = ", right of this picture"
    else:
        beyond = ""
    return (
        f"{setting}: the tree is faster below {format_bytes(crossover)}{beyond}, the ring above; "
        f"there both take {_time(n_ranks, crossover, link)}."
    )


def _time(n_ranks, tensor_bytes, link):
    return format_seconds(all_reduce_cost(n_ranks, tensor_bytes, link).seconds)


PANEL = Panel(
    name="all_reduce_time",
    title="Time of an all-reduce on your link",
    function=all_reduce_time,
    sliders=(
        Slider(
            "n_ranks",
            "Ranks N",
            (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 256, 512, 1024, 2048, 4096),
            64,
            str,
            "{} ranks".format,
        ),
        Slider(
            "latency_us",
            "Latency α",
            (0.5, 1, 2, 3, 5, 7, 10, 15, 20, 30, 50, 100),
            5,
            "{:g} µs".format,
            "{:g} microseconds".format,
        ),
        Slider(
            "bandwidth_GB_s",
            "Bandwidth B",
            (1, 2, 5, 10, 12.5, 25, 32, 50, 100, 150, 200, 300, 450, 900),
            50,
            "{:g} GB/s".format,
            "{:g} gigabytes per second".format,
        ),
    ),
)
