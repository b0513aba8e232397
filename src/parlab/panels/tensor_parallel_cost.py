"""Tensor parallelism: time per layer against the degree, communication beside compute."""

from parlab import svg
from parlab.collectives.cost import hierarchical_all_reduce_cost
from parlab.hardware import Link
from parlab.panels.panel import Panel, Picture, Slider
from parlab.tensor_traffic import layer_flops, tensor_parallel_traffic
from parlab.units import format_bytes, format_rate, format_seconds, require_int, require_number

DEGREES = (1, 2, 4, 8, 16, 32, 64)
NODE = 8  # cards that share the fast link
# Constants, because reading the data sheet costs a browser time; a test compares them with it.
FLOP_PER_S, EFFICIENCY, CARD = 989.4e12, 0.4, "H100"
NETWORK = Link(5e-6, 50e9, "InfiniBand 400G")
LINKS = {  # GB/s one way: (name, latency in microseconds)
    31.5: ("PCIe 4", 5.7),
    63: ("PCIe 5", 5.7),
    300: ("NVLink 3", 4.02),
    450: ("NVLink 4", 2.96),
    900: ("NVLink 5", 2.96),
}
HEIGHT, TOP, BOTTOM, LEFT, RIGHT = 420, 106, 360, 66, svg.WIDTH - 24


def tensor_parallel_cost(
    tp: int, hidden: int, sequence: int, micro_batch: int, link_GB_s: float
) -> Picture:
    """Draw the time that a layer computes and communicates, forward and backward, against N.

    tp: N, cards over which a layer is cut, 1 to 64. hidden, sequence, micro_batch: h, s, b.
    link_GB_s: one direction, inside a node of 8. A ring over several nodes waits in every step for
    its slowest link; a hierarchical all-reduce uses the network port of every card.

    >>> print(tensor_parallel_cost(8, 4096, 4096, 1, 450).sentence)
    N = 8 cards per layer, h = 4096, s = 4096, b = 1: in 4 all-reduces of 33.6 MB each card sends 235 MB over NVLink 4 (450 GB/s) in 688 µs; it computes for 1.82 ms (H100 at 40% of its dense bf16 peak). Communication is 27% of the time.
    """  # noqa: E501
    require_int("tp", tp, minimum=1, maximum=DEGREES[-1])
    link = _link(link_GB_s)
    flops = layer_flops(hidden, sequence, micro_batch).total
    tensor = 2 * hidden * sequence * micro_batch  # bytes in bf16
    traffic = {
        n: tensor_parallel_traffic(hidden, sequence, micro_batch, n, _slowest(n, tensor, link))
        for n in {*DEGREES, tp}
    }
    compute = {n: flops / (n * EFFICIENCY * FLOP_PER_S) for n in traffic}
    ring = {n: traffic[n].seconds for n in traffic if n > 1}
    ports = {
        n: 4 * hierarchical_all_reduce_cost(n // NODE, NODE, tensor, link, NETWORK).seconds
        for n in DEGREES
        if n > NODE
    }
    size = f"h = {hidden}, s = {sequence}, b = {micro_batch}"
    sentence = _sentence(tp, size, link, traffic[tp], compute[tp], ports)
    everything = [*compute.values(), *ring.values(), *ports.values()]
    x = svg.Scale(DEGREES[0], DEGREES[-1], LEFT, RIGHT, log=True)
    y = svg.Scale(min(everything) / 1.6, max(everything) * 1.6, BOTTOM, TOP, log=True)
    inside = [(x(n), y(ring[n])) for n in DEGREES if 1 < n <= NODE]
    outside = [(x(n), y(ring[n])) for n in DEGREES if n > NODE]
    here = [(x(tp), y(compute[tp]))] + ([(x(tp), y(ring[tp]))] if tp > 1 else [])
    edge = x(NODE * 2**0.5)  # half-way between 8 and 16
    marks = [
        svg.fill(f"M{edge:.1f} {TOP}H{RIGHT}V{BOTTOM}H{edge:.1f}z", svg.INK, 0.07),
        svg.text((LEFT + edge) / 2, TOP + 18, "inside a node"),
        svg.text((edge + RIGHT) / 2, TOP + 18, "across nodes"),
        svg.axes(
            x,
            y,
            [(n, str(n)) for n in DEGREES],
            [(seconds, format_seconds(seconds)) for seconds in svg.decades(y.low, y.high)],
            "cards N that share a layer (TP degree)",
            "time per layer, forward and backward",
        ),
        svg.stroke(svg.line([(x(tp), BOTTOM), (x(tp), TOP)]), svg.INK, 1.5, "4 4", 0.7),
        svg.stroke(svg.line((x(n), y(compute[n])) for n in DEGREES), svg.BLUE, 3),
        svg.stroke(svg.line(inside), svg.ORANGE, 3, "9 5"),
        svg.stroke(svg.line(outside), svg.ORANGE, 3, "9 5"),
        svg.stroke(svg.line((x(n), y(ports[n])) for n in ports), svg.GREEN, 3, "2 4"),
        svg.fill(svg.dots(here[:1], 6), svg.BLUE),
        svg.fill(svg.dots(here[1:], 6), svg.ORANGE),
        _legend(),
    ]
    title = f"Time per layer of tensor parallelism against compute, {tp} cards"
    return Picture(svg.document(HEIGHT, marks, title, sentence), sentence)


def _link(link_GB_s):
    rate = require_number("link_GB_s", link_GB_s, minimum=0, exclusive=True)
    name, latency_us = LINKS.get(rate, ("a link", 3))
    return Link(latency_us * 1e-6, rate * 1e9, name)


def _slowest(n, tensor, link):
    """The link that a ring over n cards waits for, in the one step or in every one."""
    links = (link, NETWORK) if n > NODE else (link,)
    return max(links, key=lambda wire: wire.latency_s + tensor / n / wire.bandwidth_bytes_per_s)


def _legend():
    rows = (
        (18, svg.BLUE, "", "compute"),
        (40, svg.ORANGE, "9 5", "4 all-reduces as one ring"),
        (62, svg.GREEN, "2 4", "4 all-reduces, hierarchical"),
    )
    return "".join(
        svg.stroke(svg.line([(6, y), (44, y)]), colour, 3, dash)
        + svg.text(50, y + 5, name, "start")
        for y, colour, dash, name in rows
    )


def _sentence(tp, size, link, traffic, compute, ports):
    card = f"({CARD} at {EFFICIENCY:.0%} of its dense bf16 peak)"
    if tp == 1:
        return (
            f"N = 1 card per layer, {size}: nothing is cut and nothing sent; "
            f"it computes for {format_seconds(compute)} {card}."
        )
    tensor, sent = traffic.items[0].tensor_bytes, traffic.bytes_per_rank
    leaves = "more than a node has, " if tp > NODE else ""
    wire = _slowest(tp, tensor, link)
    over = f"{wire.name} ({format_rate(wire.bandwidth_bytes_per_s)})"
    share = traffic.seconds / (traffic.seconds + compute)
    sentence = (
        f"N = {tp} cards per layer, {leaves}{size}: in {traffic.count} all-reduces of "
        f"{format_bytes(tensor)} each card sends {format_bytes(sent)} over {over} in "
        f"{format_seconds(traffic.seconds)}; it computes for {format_seconds(compute)} {card}. "
        f"Communication is {share:.0%} of the time"
    )
    if tp in ports:
        share = ports[tp] / (ports[tp] + compute)
        sentence += f", or {share:.0%} with a hierarchical all-reduce on all {NODE} network ports"
    return sentence + "."


PANEL = Panel(
    name="tensor_parallel_cost",
    title="Tensor parallelism: bytes and time per layer",
    function=tensor_parallel_cost,
    sliders=(
        Slider("tp", "TP degree N", DEGREES, 8, str, "{} cards per layer".format),
        Slider(
            "hidden",
            "Hidden size h",
            (1024, 2048, 4096, 5120, 6144, 8192, 12288, 16384),
            4096,
            str,
            "hidden size {}".format,
        ),
        Slider(
            "sequence",
            "Sequence s",
            (512, 1024, 2048, 4096, 8192, 16384, 32768, 131072),
            4096,
            str,
            "{} tokens".format,
        ),
        Slider("micro_batch", "Batch b", (1, 2, 4, 8), 1, str, "{} sequences".format),
        Slider(
            "link_GB_s",
            "Link in the node",
            tuple(LINKS),
            450,
            lambda rate: f"{LINKS[rate][0]}, {rate:g} GB/s",
            lambda rate: f"{LINKS[rate][0]}, {rate:g} gigabytes per second one way",
        ),
    ),
)
