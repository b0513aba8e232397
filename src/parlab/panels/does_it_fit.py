"""Does a training step fit on a card: every item on one GPU, and the cheapest change that helps."""

from parlab import svg
from parlab.memory.moments import MOMENTS
from parlab.panels.cheapest_change import (
    DEGREES,
    GPUS,
    MICRO_BATCHES,
    STAGES,
    Setting,
    cheapest_changes,
    far_end,
    n_degrees,
    peak,
)
from parlab.panels.panel import Panel, Picture, Slider
from parlab.panels.sheet import CARDS, MODELS, RECOMPUTE, short
from parlab.units import format_bytes, require_choice, require_int

ROWS = {  # of the table: colour and opacity
    "weights": (svg.BLUE, 1),
    "gradients": (svg.BLUE, 0.65),
    "optimizer": (svg.BLUE, 0.35),
    "layers' activations": (svg.ORANGE, 1),
    "logits": (svg.ORANGE, 0.5),
    "gathered, buckets": (svg.GREEN, 1),
    "temporaries": (svg.GREEN, 0.6),
    "CUDA context": (svg.INK, 0.45),
}
LEFT, RIGHT = 176, svg.WIDTH - 6
FIRST, PITCH, BAR, ROW = 48, 30, 22, 22
TABLE = FIRST + len(MOMENTS) * PITCH + 26
HEIGHT = TABLE + (len(ROWS) + 1) * ROW + 10
MOST_CARDS = 3  # the bars show so many cards at most


def does_it_fit(
    model: str,
    card: str,
    n_gpus: int,
    micro_batch: int,
    sequence: int,
    tp: int,
    recompute: str,
    stage: int,
) -> Picture:
    """Draw what one GPU holds at four moments of a step against a card, and say what would fit.

    Mixed precision (2+2+12 bytes), flash attention, no dropout; with tp > 1 norms and inputs are
    cut along the sequence. See `parlab.memory.step.training_memory`, and `cheapest_change` for the
    order of cost in which one change or two are tried; sequence, model and card are the task.

    model: a name from MODELS. card: from CARDS. n_gpus: N. micro_batch, sequence: b, s.

    >>> print(does_it_fit("llama-3-8b", "h100-sxm", 8, 1, 8192, 1, "none", 0).sentence)
    N = 8 GPUs, llama-3-8b, s = 8192, b = 1, TP 1, stage 0: 209 GB at the peak (optimizer), 124 GB above the usable 84.9 GB (h100-sxm). Cheapest fit: stage 3 (1.5 x traffic), 75.4 GB.
    """  # noqa: E501
    model = require_choice("model", model, MODELS)
    card = require_choice("card", card, CARDS)
    usable, recompute = CARDS[card], require_choice("recompute", recompute, RECOMPUTE)
    require_int("n_gpus", n_gpus, minimum=1, maximum=GPUS[-1])
    if n_gpus % require_int("tp", tp, minimum=1):
        raise ValueError(f"tp must divide n_gpus = {n_gpus}, got {tp}: the rest is data parallel")
    setting = Setting(model, sequence, n_gpus, micro_batch, tp, recompute, stage)
    memory = setting.memory
    room = usable - memory.peak
    sentence = (
        f"N = {n_gpus} GPU{'s' if n_gpus > 1 else ''}, {model}, s = {sequence}, b = {micro_batch}, "
        f"TP {tp}, stage {stage}: {format_bytes(memory.peak)} at the peak ({memory.peak_moment}), "
        f"{format_bytes(abs(room))} {'below' if room >= 0 else 'above'} the usable "
        f"{format_bytes(usable)} ({card}). " + _advice(setting, usable)
    )
    table = _table(memory)
    marks = [*_bars(memory, table, usable, card), *_listing(memory, table)]
    title = f"Memory of one of {n_gpus} GPUs that train {model}, against {card}"
    return Picture(svg.document(HEIGHT, marks, title, sentence), sentence)


def _advice(setting, usable):
    if peak(setting) <= usable:
        return "It fits."
    changes = cheapest_changes(setting, usable)
    if changes is None:
        others = {field: None for field in ("micro_batch", "recompute", "tp", "n_gpus")}
        least = min(peak(far_end(setting, stage=stage, **others)) for stage in STAGES)
        if least > usable:
            return "Nothing that these sliders do makes it fit."
        return f"No two changes make it fit, all together do: {format_bytes(least)}."
    words = " and ".join(change.words for change in changes)
    then = peak(setting._replace(**{change.field: change.value for change in changes}))
    return f"Cheapest fit: {words}, {format_bytes(then)}."


def _table(memory):
    """Bytes at each moment by row of the table."""
    table = {row: [0] * len(MOMENTS) for row in ROWS}
    for item in memory.items:
        row = table[_row(item)]
        row[:] = map(sum, zip(row, item.bytes, strict=True))
    return table


def _row(item):
    if item.name in ROWS:
        return item.name
    if "logits" in item.name:
        return "logits"
    if item.group == "activations":
        return "layers' activations"
    if item.name.startswith(("gathered", "gradients", "DDP")):
        return "gathered, buckets"
    return "temporaries"


def _bars(memory, table, usable, card):
    top = 1.06 * min(max(memory.peak, usable), MOST_CARDS * usable)
    x = svg.Scale(0, top, LEFT, RIGHT)
    limit = x(usable)
    fullest = MOMENTS.index(memory.peak_moment)
    band = svg.boxes([(0, FIRST + fullest * PITCH - 4)], svg.WIDTH, PITCH)
    yield svg.fill(band, svg.INK, 0.07)
    paths = dict.fromkeys(ROWS, "")
    for moment, (name, total) in enumerate(zip(MOMENTS, memory.totals, strict=True)):
        y, start = FIRST + moment * PITCH, 0
        for row, sizes in table.items():
            end = min(start + sizes[moment], top)
            if end > start:
                paths[row] += _bar(x(start), x(end), y, torn=end == top)
            start = end
        yield svg.text(4, y + 16, name.replace("the ", "").capitalize(), "start")
        yield svg.text(LEFT - 8, y + 16, format_bytes(total), "end")
    for row, (colour, opacity) in ROWS.items():
        yield svg.fill(paths[row], colour, opacity)
    bottom = FIRST + len(MOMENTS) * PITCH
    yield svg.stroke(svg.line([(LEFT, FIRST - 6), (LEFT, bottom)]), width=1, opacity=0.6)
    yield svg.stroke(svg.line([(limit, FIRST - 10), (limit, bottom)]), svg.INK, 2, "6 4")
    label = f"usable: {format_bytes(usable)} ({card})"
    yield svg.text(RIGHT, FIRST - 16, label, "end")


def _bar(left, right, top, torn):
    """A box; its right edge is torn where the bar goes on beyond the picture."""
    down = f"l5 {BAR / 4:.1f}l-5 {BAR / 4:.1f}" * 2 if torn else f"v{BAR}"
    return f"M{left:.1f} {top:.1f}H{right:.1f}{down}H{left:.1f}z"


def _listing(memory, table):
    fullest = MOMENTS.index(memory.peak_moment)
    lines = {row: (sizes[fullest], sizes[0]) for row, sizes in table.items()}
    lines["together"] = (memory.peak, memory.after_step)
    at_peak, after = 330, RIGHT
    yield svg.text(at_peak, TABLE - 2, "at the peak", "end")
    yield svg.text(after, TABLE - 2, "after the step", "end")
    for line, (row, sizes) in enumerate(lines.items(), start=1):
        y = TABLE + line * ROW
        if row in ROWS:
            yield svg.fill(svg.boxes([(4, y - 12)], 15, 14), *ROWS[row])
        yield svg.text(26, y, row, "start")
        for place, size in zip((at_peak, after), sizes, strict=True):
            yield svg.text(place, y, format_bytes(size), "end")


PANEL = Panel(
    name="does_it_fit",
    title="Does a training step fit?",
    function=does_it_fit,
    sliders=(
        Slider("model", "Model", tuple(MODELS), "llama-3-8b", short, str),
        Slider("card", "Card", tuple(CARDS), "h100-sxm", str, str),
        Slider("n_gpus", "GPUs N", GPUS, 8, str, "{} GPUs".format),
        Slider("micro_batch", "Micro-batch b", MICRO_BATCHES, 1, str, "{} sequences".format),
        Slider(
            "sequence",
            "Sequence s",
            (1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072),
            8192,
            str,
            "{} tokens".format,
        ),
        Slider(
            "tp",
            "TP degree",
            DEGREES,
            1,
            str,
            "{} GPUs share a layer".format,
            count=lambda values: n_degrees(values["model"], values["n_gpus"]),
        ),
        Slider("recompute", "Recompute", RECOMPUTE, "none", str, str),
        Slider("stage", "ZeRO stage", STAGES, 0, str, "stage {}".format),
    ),
)
