"""Bytes of the busiest rank against the number of ranks: the ring and the naive scheme."""

from parlab import svg
from parlab.collectives.cost import all_reduce_cost
from parlab.hardware import Link
from parlab.panels.panel import Panel, Picture, Slider
from parlab.units import format_bytes, require_int, require_number

RANKS = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 256, 512, 1024)
HEIGHT, TOP, BOTTOM, LEFT, RIGHT = 380, 64, 320, 66, svg.WIDTH - 24
ANY_LINK = Link(0, 1)  # bytes do not depend on the link


def bytes_per_rank(n_ranks: int, tensor_mb: float) -> Picture:
    """Draw the bytes that the busiest rank sends or receives, both axes logarithmic.

    n_ranks: N, 2 to 1024. tensor_mb: S in MB (10^6 bytes), the same on every rank.

    >>> print(bytes_per_rank(8, 1000).sentence)
    N = 8 ranks, S = 1 GB: the ring moves 1.75 GB per rank, 2(N-1)/N = 1.75 S; gather and broadcast moves 7 GB through rank 0, N-1 = 7 S.
    """  # noqa: E501
    require_int("n_ranks", n_ranks, minimum=RANKS[0], maximum=RANKS[-1])
    require_number("tensor_mb", tensor_mb, minimum=0, exclusive=True)
    tensor_bytes = tensor_mb * 1e6
    ring = {n: _busiest(n, tensor_bytes, "ring") for n in {*RANKS, n_ranks}}
    naive = {n: _busiest(n, tensor_bytes, "naive") for n in {*RANKS, n_ranks}}
    x = svg.Scale(RANKS[0], RANKS[-1], LEFT, RIGHT, log=True)
    y = svg.Scale(tensor_bytes / 1.6, naive[RANKS[-1]] * 1.6, BOTTOM, TOP, log=True)
    here = x(n_ranks)
    sentence = (
        f"N = {n_ranks} ranks, S = {format_bytes(tensor_bytes)}: the ring moves "
        f"{format_bytes(ring[n_ranks])} per rank, 2(N-1)/N = {ring[n_ranks] / tensor_bytes:.4g} S; "
        f"gather and broadcast moves {format_bytes(naive[n_ranks])} through rank 0, "
        f"N-1 = {n_ranks - 1} S."
    )
    limit = y(2 * tensor_bytes)
    marks = [
        svg.axes(
            x,
            y,
            [(n, str(n)) for n in (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)],
            [(size, format_bytes(size)) for size in svg.decades(y.low, y.high)],
            "number of ranks N",
            "bytes of the busiest rank",
        ),
        svg.stroke(svg.line([(LEFT, limit), (RIGHT, limit)]), svg.INK, 1.5, "2 4", 0.7),
        svg.text(RIGHT, limit - 8, f"limit 2 S = {format_bytes(2 * tensor_bytes)}", "end"),
        svg.stroke(svg.line((x(n), y(ring[n])) for n in RANKS), svg.BLUE, 3),
        svg.stroke(svg.line((x(n), y(naive[n])) for n in RANKS), svg.ORANGE, 3, "9 5"),
        svg.stroke(svg.line([(here, BOTTOM), (here, TOP)]), svg.INK, 1.5, "4 4", 0.7),
        svg.fill(svg.dots([(here, y(ring[n_ranks]))], 6), svg.BLUE),
        svg.fill(svg.dots([(here, y(naive[n_ranks]))], 6), svg.ORANGE),
        svg.stroke(svg.line([(6, 16), (38, 16)]), svg.BLUE, 3),
        svg.text(44, 21, "ring", "start"),
        svg.stroke(svg.line([(110, 16), (142, 16)]), svg.ORANGE, 3, "9 5"),
        svg.text(148, 21, "naive: gather and broadcast", "start"),
    ]
    title = f"Bytes of the busiest rank in an all-reduce, {n_ranks} ranks"
    return Picture(svg.document(HEIGHT, marks, title, sentence), sentence)


def _busiest(n_ranks, tensor_bytes, algorithm):
    return all_reduce_cost(n_ranks, tensor_bytes, ANY_LINK, algorithm).bytes_per_rank


def _size(megabytes):
    return format_bytes(megabytes * 1e6)


PANEL = Panel(
    name="bytes_per_rank",
    title="Bytes per rank in an all-reduce",
    function=bytes_per_rank,
    sliders=(
        Slider("n_ranks", "Ranks N", RANKS, 8, str, "{} ranks".format),
        Slider(
            "tensor_mb",
            "Tensor size S",
            (0.001, 0.01, 0.1, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 14000, 100000),
            1000,
            _size,
            _size,
        ),
    ),
)
