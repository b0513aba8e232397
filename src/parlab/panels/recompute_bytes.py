"""Where the bytes of a layer's activations go, and which of them recomputation drops."""

from parlab import svg
from parlab.memory.activations import activation_memory
from parlab.panels.panel import Panel, Picture, Slider
from parlab.panels.sheet import MODELS, RECOMPUTE, short
from parlab.units import format_bytes, require_choice

NAMES = tuple(
    name for name, config in MODELS.items() if config.experts == 1 and config.kv_heads % 8 == 0
)
KINDS = ("attention", "scores", "MLP", "norms")
TENSORS = {  # as memory.activations names them, and as the picture does
    "up": "up",
    "input of queries, keys, values": "input",
    "queries": "q",
    "keys": "k",
    "values": "v",
    "input of the projection": "output",
    "dropout mask": "mask",
    "softmax output": "softmax",
    "softmax dropout mask": "mask",
    "softmax after dropout": "after dropout",
    "log-sum-exp of the scores": "log-sum-exp",
    "input of the first matrix": "input",
    "input of GeLU": "before GeLU",
    "input of the second matrix": "after GeLU",
    "input of gate and up": "input",
    "gate before SiLU": "gate",
    "gate after SiLU": "SiLU",
    "input of down": "product",
    "input of the first": "before attention",
    "input of the second": "before the MLP",
}
LEFT, RIGHT = 4, svg.WIDTH - 4
FIRST, ROW, BAR = 58, 72, 20
HEIGHT = FIRST + len(KINDS) * ROW + 40


def recompute_bytes(
    model: str,
    sequence: int,
    micro_batch: int,
    tp: int,
    flash: bool,
    recompute: str,
    sequence_parallel: bool,
) -> Picture:
    """Draw the tensors that one layer keeps for backward on one GPU, in bytes and units of s b h.

    Full recomputation runs a layer's forward again, 1/3 of forward and backward; selective only
    what turns queries, keys and values into attention's output: the scores' share of the FLOP of
    forward / 3, without a causal mask. Equation 8 of Korthikanti et al. (arXiv 2205.05198) adds the
    scores' FLOP three times, not once, and has 2.7% for GPT-3 where this has 0.9%.

    model: a name from NAMES; GPT's have dropout, Llama's none. sequence, micro_batch: s, b.
    tp: N, GPUs that share a layer. flash: a kernel that keeps no scores. recompute: "none",
    "selective" or "full". sequence_parallel: also norms and inputs are cut by N.

    >>> print(recompute_bytes("gpt-175b", 2048, 1, 8, False, "selective", True).sentence)
    N = 8 GPUs a layer with SP, gpt-175b, s = 2048, b = 1, no flash: a layer keeps 107 MB, 70.2% less than 359 MB; 96 layers 10.3 GB. Backward runs the scores again: 0.901% more compute.
    """  # noqa: E501
    model = require_choice("model", model, NAMES)
    config = MODELS[model]
    recompute = require_choice("recompute", recompute, RECOMPUTE)
    size = {"sequence": sequence, "tp": tp, "sequence_parallel": sequence_parallel}
    size |= {"dropout": model.startswith("gpt"), "flash": flash}
    memory = {
        choice: activation_memory(config, micro_batch, recompute=choice, **size)
        for choice in RECOMPUTE
    }
    explicit = activation_memory(config, micro_batch, **size | {"flash": False})
    flops = config.flops_per_token(sequence)
    scores = flops.scores / (flops.forward - flops.head)
    gpus = f"{tp} GPU{'s' if tp > 1 else ''}"
    cut = " with SP" if sequence_parallel and tp > 1 else ""
    setting = (
        f"N = {gpus} a layer{cut}, {model}, s = {sequence}, b = {micro_batch}, "
        f"{'flash' if flash else 'no flash'}"
    )
    sentence = f"{setting}: {_sentence(memory, recompute, scores, config.layers)}"
    unit = sequence * micro_batch * config.hidden
    marks = [
        *_legend(flash),
        *_rows(memory["none"], memory[recompute], explicit, unit),
        *_totals(memory["none"], memory[recompute], config.layers, unit),
    ]
    title = f"What one layer of {model} keeps for backward, recomputation: {recompute}"
    return Picture(svg.document(HEIGHT, marks, title, sentence), sentence)


def _sentence(memory, recompute, scores, layers):
    whole, kept = memory["none"].layer_bytes, memory[recompute].layer_bytes
    dropped = {choice: _percent(1 - of.layer_bytes / whole) for choice, of in memory.items()}
    keeps = f"a layer keeps {format_bytes(kept)}"
    if recompute == "none":
        return (
            f"{keeps}, {layers} layers {format_bytes(layers * kept)}. Selective recompute "
            f"would drop {dropped['selective']} for {_percent(scores / 3)} more compute, "
            f"full {dropped['full']} for {_percent(1 / 3)}."
        )
    again = f"forward again: {_percent(1 / 3)} more compute"
    if recompute == "selective":
        again = f"the scores again: {_percent(scores / 3)} more compute"
    return (
        f"{keeps}, {dropped[recompute]} less than {format_bytes(whole)}; {layers} layers "
        f"{format_bytes(layers * kept)}. Backward runs {again}."
    )


def _percent(share):
    return f"{_number(100 * share)}%"


def _number(value):
    """Three significant digits, without an exponent."""
    return f"{float(f'{value:.3g}'):.12g}"


def _kind(item):
    is_scores = item.tensor.startswith(("softmax", "log-sum-exp"))
    return "scores" if is_scores else item.block


def _bytes(items):
    return sum(item.layer_bytes for item in items)


def _legend(flash):
    yield svg.fill(svg.boxes([(LEFT, 7)], 15, 14), svg.BLUE)
    yield svg.text(LEFT + 21, 19, "kept", "start")
    yield svg.fill(svg.boxes([(78, 7)], 15, 14), svg.ORANGE, 0.4)
    yield svg.text(99, 19, "computed again", "start")
    if flash:
        yield svg.stroke(svg.boxes([(238, 7)], 15, 14), svg.INK, 1.5, "3 3")
        yield svg.text(259, 19, "never kept, thanks to flash", "start")


def _rows(whole, kept, explicit, unit):
    kinds = {kind: [item for item in whole.items if _kind(item) == kind] for kind in KINDS}
    # What full recomputation keeps, the layer's input, is what the first norm reads.
    still = {("norms", "input of the first") if i.block == "layer" else i[:2] for i in kept.items}
    x = svg.Scale(0, max(map(_bytes, kinds.values())), LEFT, RIGHT)
    boxes = {True: "", False: ""}
    for row, (kind, items) in enumerate(kinds.items()):
        y, start = FIRST + row * ROW, 0
        for item in items:
            end = start + item.layer_bytes
            boxes[item[:2] in still] += _box(x(start), x(end), y + 8)
            start = end
        parts = (f"{TENSORS[item.tensor]} {_number(item.layer_bytes / unit)}" for item in items)
        kept_bytes = _bytes(item for item in items if item[:2] in still)
        yield svg.text(LEFT, y, kind, "start")
        yield svg.text(RIGHT, y, _share(kept_bytes, start, unit), "end")
        yield svg.text(LEFT, y + 45, " · ".join(parts), "start", 14)
        never = _bytes(item for item in explicit.items if _kind(item) == kind)
        if never > start:
            yield svg.stroke(_outline(x, start, never, y + 8), svg.INK, 1.5, "3 3")
    yield svg.fill(boxes[True], svg.BLUE)
    yield svg.fill(boxes[False], svg.ORANGE, 0.4)


def _box(left, right, top):
    """A box, and a gap to the next one where it is wide enough."""
    gap = 1.5 if right - left > 4 else 0
    return svg.boxes([(left, top)], right - left - gap, BAR)


def _outline(x, start, end, top):
    """A box that stays open on the right where it goes on beyond the picture."""
    left, right = x(start), x(min(end, x.high))
    return f"M{right:.1f} {top:.1f}H{left:.1f}v{BAR}H{right:.1f}{'z' if end <= x.high else ''}"


def _share(kept, whole, unit):
    kept_units, whole_units = _number(kept / unit), _number(whole / unit)
    if kept_units == whole_units:
        return f"{whole_units} sbh = {format_bytes(kept)}"
    return f"{kept_units} of {whole_units} sbh = {format_bytes(kept)} of {format_bytes(whole)}"


def _totals(whole, kept, layers, unit):
    y = FIRST + len(KINDS) * ROW
    yield svg.text(LEFT, y, "one layer", "start")
    yield svg.text(RIGHT, y, _share(kept.layer_bytes, whole.layer_bytes, unit), "end")
    yield svg.text(LEFT, y + 22, f"{layers} layers", "start")
    now, before = (format_bytes(layers * each.layer_bytes) for each in (kept, whole))
    yield svg.text(RIGHT, y + 22, now if now == before else f"{now} of {before}", "end")


def _on(switch):
    return "on" if switch else "off"


PANEL = Panel(
    name="recompute_bytes",
    title="Activations of one layer, and what recomputation drops",
    function=recompute_bytes,
    sliders=(
        Slider("model", "Model", NAMES, "gpt-175b", short, str),
        Slider(
            "sequence",
            "Sequence s",
            (512, 1024, 2048, 4096, 8192, 16384, 32768, 131072),
            2048,
            str,
            "{} tokens".format,
        ),
        Slider("micro_batch", "Micro-batch b", (1, 2, 4, 8), 1, str, "{} sequences".format),
        Slider("tp", "TP degree N", (1, 2, 4, 8), 8, str, "{} GPUs per layer".format),
        Slider("flash", "Flash", (False, True), False, _on, _on),
        Slider("recompute", "Recompute", RECOMPUTE, "selective", str, str),
        Slider("sequence_parallel", "Seq. parallel", (False, True), True, _on, _on),
    ),
)
