"""Layouts as rows: a bar of an iteration's time by what takes it, and one of memory."""

from parlab import svg
from parlab.units import format_bytes, format_seconds

PARTS = {  # of an iteration: colour, opacity, and the planner's items in it
    "matrix products": (svg.BLUE, 1, ("matmul", "attention", "head and loss")),
    "other kernels": (svg.BLUE, 0.55, ("elementwise", "launches")),
    "recompute": (svg.BLUE, 0.25, ("recompute",)),
    "TP": (svg.ORANGE, 1, ("tensor parallel",)),
    "CP, EP": (svg.ORANGE, 0.5, ("context parallel", "expert parallel")),
    "DP": (svg.GREEN, 1, ("data parallel", "slower beside collectives")),
    "optimizer": (svg.GREEN, 0.5, ("optimizer",)),
    "pipeline": (svg.INK, 0.4, ("bubble", "pipeline transfers")),
}
LEFT, RIGHT = 50, 406  # of the bars
PITCH, TIME_BAR, MEMORY_BAR = 58, 16, 8
LONGEST = 2.5  # bars of time are as long as so many of the best one, at most
MEMORY_AXIS = 1.3  # of the usable bytes
ROW = 20
BEST, CHOSEN = 330, svg.WIDTH - 4  # right edges of the table's columns


def seconds_by_part(made):
    """Return {part: seconds} of an Estimate; the parts sum to its seconds."""
    seconds = {item.name: item.seconds for item in made.times}
    parts = {
        part: sum(seconds.pop(name, 0) for name in names) for part, (_, _, names) in PARTS.items()
    }
    assert not seconds, f"the planner names {', '.join(seconds)}, which no part holds"
    return parts


def layout_words(layout):
    """Write a layout in the width of the picture.

    >>> from parlab.planner.layout import Layout
    >>> layout_words(Layout(dp=4, tp=8, zero=1, recompute="full", sequence_parallel=True))
    'dp 4 tp 8, ZeRO-1, b 1, full recompute, SP'
    """
    words = str(layout).split(", ")
    degrees = [word for word in words if word.split()[0] in ("dp", "tp", "pp", "cp", "ep", "v")]
    others = [word for word in words if word not in degrees]
    others = [
        f"{word.split()[1]} recompute" if word.startswith("recompute ") else word for word in others
    ]
    return ", ".join([" ".join(degrees), *others] if degrees else others)


def draw_rows(best, layout, chosen, usable, cluster, top=18):
    """Draw the best Estimates, then a chosen Layout with its Estimate, None where it is impossible.

    usable: bytes of a card of the cluster. Without any best layout their rows say so.
    """
    shown = [*best, *([chosen] if chosen else [])]
    fastest = best[0].seconds if best else max((made.seconds for made in shown), default=1)
    longest = min(max((made.seconds for made in shown), default=1), LONGEST * fastest)
    x = svg.Scale(0, longest, LEFT, RIGHT)
    bytes_to_x = svg.Scale(0, MEMORY_AXIS * usable, LEFT, RIGHT)
    paths = dict.fromkeys(PARTS, "")
    memory, labels = "", []
    names = ["best", "2nd", "3rd", "yours"]
    rows = [*best, *[None] * (3 - len(best)), chosen]
    yield svg.fill(svg.boxes([(0, top + 3 * PITCH - 16)], svg.WIDTH, PITCH), svg.INK, 0.07)
    for number, (name, made) in enumerate(zip(names, rows, strict=True)):
        y = top + number * PITCH
        labels.append(svg.text(4, y, name, "start", 14))
        if made is None:
            words = "no layout fits" if not best else "no other within 2%"
            if name == "yours":
                words = layout_words(layout)
                labels.append(svg.text(LEFT, y + 19, "not possible", "start", 14))
            labels.append(svg.text(LEFT, y, words, "start", 14))
            continue
        labels.append(svg.text(LEFT, y, layout_words(made.layout), "start", 14))
        start = 0
        for part, seconds in seconds_by_part(made).items():
            end = min(start + seconds, longest)
            if end > start:
                torn = start + seconds > longest * (1 + 1e-9)  # sums are rounded
                paths[part] += _bar(x(start), x(end), y + 6, TIME_BAR, torn)
            start += seconds
        labels.append(svg.text(RIGHT + 6, y + 19, format_seconds(made.seconds), "start", 14))
        held = min(made.peak_bytes, MEMORY_AXIS * usable)
        torn = made.peak_bytes > MEMORY_AXIS * usable
        memory += _bar(LEFT, bytes_to_x(held), y + 26, MEMORY_BAR, torn)
        labels.append(svg.text(RIGHT + 6, y + 35, format_bytes(made.peak_bytes), "start", 14))
    for part, (colour, opacity, _) in PARTS.items():
        yield svg.fill(paths[part], colour, opacity)
    yield svg.fill(memory, svg.INK, 0.55)
    yield from labels
    limit, bottom = bytes_to_x(usable), top + 3 * PITCH + 42
    ticks = [[(limit, y + 22), (limit, y + 38)] for y in range(top, top + 4 * PITCH, PITCH)]
    yield svg.stroke("".join(map(svg.line, ticks)), svg.INK, 2.5)
    words = f"grey bar: memory, the line: usable {format_bytes(usable)} ({cluster})"
    yield svg.text(4, bottom + 15, words, "start", 14)


def _bar(left, right, top, height, torn):
    """A box; its right edge is torn where the bar goes on beyond the picture."""
    down = f"l5 {height / 4:.1f}l-5 {height / 4:.1f}" * 2 if torn else f"v{height}"
    return f"M{left:.1f} {top:.1f}H{right:.1f}{down}H{left:.1f}z"


def draw_table(best, chosen, top):
    """Write seconds by part, and what they come to, for two Estimates of which either may be None.

    top: the upper edge of the first line.
    """
    columns = [(BEST, best), (CHOSEN, chosen)]
    yield svg.text(BEST, top + 14, "best", "end", 14)
    yield svg.text(CHOSEN, top + 14, "yours", "end", 14)
    parts = {at: seconds_by_part(made) for at, made in columns if made}
    for line, (part, (colour, opacity, _)) in enumerate(PARTS.items(), start=1):
        y = top + line * ROW
        yield svg.fill(svg.boxes([(4, y + 2)], 15, 14), colour, opacity)
        yield svg.text(26, y + 14, part, "start", 14)
        for at, seconds in parts.items():
            yield svg.text(at, y + 14, format_seconds(seconds[part]), "end", 14)
    sums = {
        "an iteration": lambda made: format_seconds(made.seconds),
        "tokens/s per GPU": lambda made: f"{made.tokens_per_second_per_gpu:,.0f}",
        "MFU": lambda made: f"{made.mfu:.1%}",
    }
    for line, (name, write) in enumerate(sums.items(), start=len(PARTS) + 1):
        y = top + line * ROW
        yield svg.text(26, y + 14, name, "start", 14)
        for at, made in columns:
            if made:
                yield svg.text(at, y + 14, write(made), "end", 14)
