"""DDP's backward and its all-reduces on one time axis: what stays exposed, for which buckets."""

from functools import lru_cache
from math import ceil, floor, log10

from parlab import svg
from parlab.buckets import ddp_buckets, overlap
from parlab.hardware import Link
from parlab.panels.panel import Panel, Picture, Slider
from parlab.units import (
    MIB,
    format_bytes,
    format_rate,
    format_seconds,
    require_choice,
    require_int,
    require_number,
)

# Name: layers and hidden size. Table 2.1 of Brown et al. (2020), with 5120 where it has 5140.
MODELS = {
    "85M": (12, 768),
    "302M": (24, 1024),
    "1.2B": (24, 2048),
    "2.5B": (32, 2560),
    "6.4B": (32, 4096),
    "12.6B": (40, 5120),
}
GRADIENT_BYTES = 2  # bf16
DEFAULT_MIB = 25  # torch's; its first bucket is 1 MiB
BUCKETS_MIB = (1, 2, 5, 10, 25, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 25000)
LEFT, RIGHT = 66, svg.WIDTH - 20
LANES, LANE, BOTTOM = (54, 96), 30, 136  # tops of the two lanes, their height, their axis
TOP_OF_CURVE, BASE = 226, 336
HEIGHT = BASE + 50


def ddp_overlap(
    model: str,
    bucket_mib: int,
    bandwidth_GB_s: float,
    backward_ms: float,
    n_ranks: int = 64,
    latency_us: float = 5,
) -> Picture:
    """Draw backward above the all-reduces of its buckets, and exposed time against bucket size.

    model: a name from MODELS, transformer layers only, gradients in bf16. bucket_mib: cap in MiB;
    25 stands for torch's default, which starts with a bucket of 1 MiB. bandwidth_GB_s, latency_us:
    the link, one direction. backward_ms: backward alone. n_ranks: N, in one ring.

    >>> print(ddp_overlap("1.2B", 25, 50, 150).sentence)
    N = 64 ranks on links of 5 µs and 50 GB/s, 2.42 GB of bf16 gradients (1.2B parameters) in 73 buckets, closed at 25 MiB: the all-reduces take 141 ms, of which backward, 150 ms, leaves 2.58 ms (2%) exposed.
    """  # noqa: E501
    model = require_choice("model", model, MODELS)
    layers, hidden = MODELS[model]
    require_int("bucket_mib", bucket_mib, minimum=1)
    n = require_int("n_ranks", n_ranks, minimum=2, why="one rank has nobody to reduce with")
    backward = require_number("backward_ms", backward_ms, minimum=0, exclusive=True) / 1000
    link = Link(latency_us * 1e-6, bandwidth_GB_s * 1e9)
    sizes = _buckets(layers, hidden, bucket_mib)
    timeline = overlap(sizes, backward, n, link)
    curve = [
        overlap(_buckets(layers, hidden, mib), backward, n, link).exposed_seconds
        for mib in BUCKETS_MIB
    ]
    sentence = _sentence(model, sizes, bucket_mib, timeline, n, link)
    marks = [*_timeline(timeline), *_curve(curve, bucket_mib, timeline)]
    title = f"Backward and all-reduces of a model with {model} parameters on {n} ranks"
    return Picture(svg.document(HEIGHT, marks, title, sentence), sentence)


@lru_cache(maxsize=256)
def _buckets(layers, hidden, bucket_mib):
    cap = None if bucket_mib == DEFAULT_MIB else bucket_mib * MIB
    return [bucket.bytes for bucket in ddp_buckets(_gradients(layers, hidden), cap)]


@lru_cache(maxsize=16)
def _gradients(layers, hidden):
    """Bytes of a layer's parameters in order: norm, attention, norm, MLP; weights and biases."""
    h = hidden
    attention = (h, h, 3 * h * h, 3 * h, h * h, h)
    mlp = (h, h, 4 * h * h, 4 * h, 4 * h * h, h)
    return tuple(GRADIENT_BYTES * count for count in (attention + mlp) * layers)


def _timeline(timeline):
    total, backward = timeline.total_seconds, timeline.backward_seconds
    x = svg.Scale(0, total, LEFT + 30, RIGHT)
    top, bottom = LANES
    begins = (0.0, *timeline.ready[:-1])
    computing = list(zip(begins, timeline.ready, strict=True))
    reducing = list(zip(timeline.start, timeline.end, strict=True))
    done = x(backward)
    exposed = format_seconds(timeline.exposed_seconds)
    marks = [
        svg.fill(_span(backward, total, x, top - 6, BOTTOM - top + 6), svg.ORANGE, 0.16),
        svg.stroke(svg.line([(done, top - 10), (done, BOTTOM)]), svg.INK, 1.5, "4 4", 0.8),
        svg.stroke(svg.line([(x.start, BOTTOM), (RIGHT, BOTTOM)]), width=1, opacity=0.6),
        svg.text(x.start - 6, top + 20, "backward", "end"),
        svg.text(x.start - 6, bottom + 20, "all-reduce", "end"),
        svg.text(x.start, BOTTOM + 18, "0", size=14),
        svg.text(RIGHT, BOTTOM + 18, format_seconds(total), "end", 14),
        svg.text(4, 24, f"exposed: {exposed} of {format_seconds(total)}", "start"),
    ]
    if x.start + 50 < done < RIGHT - 90:
        marks.append(svg.text(done, BOTTOM + 18, format_seconds(backward), size=14))
    for spans, lane, colour in ((computing, top, svg.BLUE), (reducing, bottom, svg.ORANGE)):
        # Two shades in turn keep neighbouring buckets apart.
        for first, shade in ((0, 0.85), (1, 0.45)):
            path = "".join(_span(*span, x, lane, LANE) for span in spans[first::2])
            marks.append(svg.fill(path, colour, shade))
    return marks


def _span(start, end, x, top, height):
    return f"M{x(start):.1f} {top}H{x(end):.1f}V{top + height}H{x(start):.1f}Z"


def _curve(exposed, bucket_mib, timeline):
    x = svg.Scale(BUCKETS_MIB[0], BUCKETS_MIB[-1], LEFT, RIGHT, log=True)
    low, high = 10.0 ** floor(log10(min(exposed))), 10.0 ** ceil(log10(max(exposed)) + 0.1)
    y = svg.Scale(low, high, BASE, TOP_OF_CURVE, log=True)
    points = [(x(mib), y(seconds)) for mib, seconds in zip(BUCKETS_MIB, exposed, strict=True)]
    here = x(bucket_mib), y(timeline.exposed_seconds)
    return [
        svg.axes(
            x,
            y,
            [(mib, f"{mib}") for mib in (1, 10, 100, 1000, 10000)],
            [(seconds, format_seconds(seconds)) for seconds in svg.decades(low, high, 4)],
            "bucket cap in MiB",
            "exposed time",
        ),
        svg.stroke(svg.line(points), svg.ORANGE, 3),
        svg.stroke(svg.line([(here[0], BASE), (here[0], TOP_OF_CURVE)]), svg.INK, 1.5, "4 4", 0.7),
        svg.fill(svg.dots([here], 6), svg.ORANGE),
    ]


def _sentence(model, sizes, bucket_mib, timeline, n, link):
    buckets = (
        f"{len(sizes)} buckets, closed at {bucket_mib} MiB" if len(sizes) > 1 else "one bucket"
    )
    share = timeline.exposed_seconds / timeline.communication_seconds
    return (
        f"N = {n} ranks on links of {format_seconds(link.latency_s)} and "
        f"{format_rate(link.bandwidth_bytes_per_s)}, {format_bytes(sum(sizes))} of bf16 gradients "
        f"({model} parameters) in {buckets}: the all-reduces take "
        f"{format_seconds(timeline.communication_seconds)}, of which backward, "
        f"{format_seconds(timeline.backward_seconds)}, leaves "
        f"{format_seconds(timeline.exposed_seconds)} ({share:.0%}) exposed."
    )


def _cap(mib):
    return f"{mib:,} MiB"


PANEL = Panel(
    name="ddp_overlap",
    title="DDP's buckets and what they leave exposed",
    function=ddp_overlap,
    sliders=(
        Slider("model", "Model", tuple(MODELS), "1.2B", str, "{} parameters".format),
        Slider("bucket_mib", "Bucket", BUCKETS_MIB, DEFAULT_MIB, _cap, _cap),
        Slider(
            "bandwidth_GB_s",
            "Bandwidth B",
            (1, 2, 5, 10, 12.5, 25, 50, 100, 200, 450),
            50,
            "{:g} GB/s".format,
            "{:g} gigabytes per second".format,
        ),
        Slider(
            "backward_ms",
            "Backward",
            (10, 20, 50, 100, 150, 200, 300, 500, 1000, 2000),
            150,
            "{} ms".format,
            "{} milliseconds".format,
        ),
    ),
    constants={"n_ranks": 64, "latency_us": 5},
)
