"""The ladder of ZeRO: what each stage leaves on a GPU, against a card, and what it sends."""

from parlab import svg
from parlab.memory.states import BYTE_RECIPES, zero_memory
from parlab.memory.traffic import zero_traffic_bytes
from parlab.panels.panel import Panel, Picture, Slider
from parlab.panels.sheet import CARDS, MODELS, count, short
from parlab.units import format_bytes, require_choice

PARAMS = {"1.3B": 1_300_000_000, "7B": 7 * 10**9, "7.5B": 7_500_000_000, "13B": 13 * 10**9}
PARAMS |= {"128B": 128 * 10**9, "1T": 10**12}
PARAMS |= {name: config.n_params for name, config in MODELS.items()}
PARAMS = dict(sorted(PARAMS.items(), key=lambda item: item[1]))
GPUS = tuple(2**k for k in range(11))
STAGES = range(4)
PARTS = {"weights": svg.BLUE, "gradients": svg.ORANGE, "optimizer": svg.GREEN}
CUT = ("nothing", "optimizer", "+ gradients", "+ weights")
COLUMN, BAR, RIGHT = 101, 62, svg.WIDTH - 2
LEFT = RIGHT - len(STAGES) * COLUMN
TOP, BASE, ROW = 70, 286, 22
HEIGHT = BASE + 5 * ROW + 8
MOST_CARDS = 4  # the picture is as high as so many cards, at most


def zero_ladder(model: str, n_gpus: int, stage: int, recipe: str, card: str) -> Picture:
    """Draw the model states on one GPU at each stage beside a card, and what a step sends.

    model: a name from PARAMS. n_gpus: N, all of them data parallel. stage: the one that the
    sentence tells. recipe: a name from BYTE_RECIPES; weights and gradients are sent as they are
    held, once a step. card: a name from CARDS, which has the bytes that its driver reports.

    >>> print(zero_ladder("7.5B", 64, 2, "mixed-precision", "40e9 B").sentence)
    N = 64 GPUs, 7.5B parameters, 2+2+12 bytes, stage 2: weights 15 GB + gradients 234 MB + optimizer 1.41 GB = 16.6 GB, 23.4 GB below the usable 40 GB (40e9 B). Traffic: 1 x DP. First to fit: stage 1.
    """  # noqa: E501
    recipe = require_choice("recipe", recipe, BYTE_RECIPES)
    model = require_choice("model", model, PARAMS)
    card = require_choice("card", card, CARDS)
    params, usable, each = PARAMS[model], CARDS[card], BYTE_RECIPES[recipe].arguments
    chosen = zero_memory(params, n_gpus, stage, **each)
    memory = [zero_memory(params, n_gpus, s, **each) for s in STAGES]
    sent_as = {name: each[name] for name in ("weight_bytes", "grad_bytes")}
    sent = [zero_traffic_bytes(params, n_gpus, s, **sent_as) for s in STAGES]
    elements = [zero_traffic_bytes(1, n_gpus, s, weight_bytes=1, grad_bytes=1) for s in STAGES]
    fitting = [s for s in STAGES if memory[s].total <= usable]
    sentence = (
        f"N = {n_gpus} GPU{'s' if n_gpus > 1 else ''}, {_named(model, params)}, "
        f"{_recipe(recipe)} bytes, stage {stage}: {_parts(chosen)}, "
        f"{_room(usable - chosen.total)} the usable {format_bytes(usable)} ({card}). "
        f"{_sends(sent, stage)} "
        + (f"First to fit: stage {fitting[0]}." if fitting else "No stage fits.")
    )
    marks = [*_bars(memory, stage, usable, card), *_table(memory, usable, elements, sent)]
    title = f"Model states of {model} on each of {n_gpus} GPUs, by stage of ZeRO"
    return Picture(svg.document(HEIGHT, marks, title, sentence), sentence)


def _named(model, params):
    return f"{model} parameters" if model[0].isdigit() else f"{model} ({count(params)})"


def _parts(states):
    parts = " + ".join(f"{part} {format_bytes(getattr(states, part))}" for part in PARTS)
    return f"{parts} = {format_bytes(states.total)}"


def _room(left):
    return f"{format_bytes(abs(left))} {'below' if left >= 0 else 'above'}"


def _sends(sent, stage):
    return f"Traffic: {sent[stage] / sent[0]:.3g} x DP." if sent[0] else "Traffic: none."


def _recipe(name):
    known = BYTE_RECIPES[name]
    return "+".join(f"{size:g}" for size in (known.weight_bytes, known.grad_bytes, known.k))


def _bars(memory, chosen, usable, card):
    top = 1.1 * min(max(memory[0].total, usable), MOST_CARDS * usable)
    y = svg.Scale(0, top, BASE, TOP)
    middle = [LEFT + (stage + 0.5) * COLUMN for stage in STAGES]
    band = svg.boxes([(middle[chosen] - COLUMN / 2, TOP - 22)], COLUMN, HEIGHT - TOP + 22)
    paths = dict.fromkeys(PARTS, "")
    labels, limit = [], y(usable)
    for place, states in zip(middle, memory, strict=True):
        below, left = 0, place - BAR / 2
        for part in PARTS:
            above = min(below + getattr(states, part), top)
            if above > below:
                paths[part] += _bar(left, y(below), y(above), torn=above == top)
            below = above
        baseline = y(below) - (14 if below == top else 7)
        if limit - 4 < baseline < limit + 18:
            baseline = limit - 6  # the card's line does not cross the number
        labels.append(svg.text(place, baseline, format_bytes(states.total)))
    return [
        svg.fill(band, svg.INK, 0.07),
        *(svg.fill(paths[part], colour) for part, colour in PARTS.items()),
        svg.stroke(svg.line([(LEFT, BASE), (RIGHT, BASE)]), width=1, opacity=0.6),
        svg.stroke(svg.line([(LEFT - 4, limit), (RIGHT, limit)]), svg.INK, 2, "6 4"),
        svg.text(LEFT - 7, limit + 5, format_bytes(usable), "end"),
        *labels,
        *_legend(card),
    ]


def _bar(left, bottom, top, torn):
    """A box; its upper edge is torn where the bar goes on beyond the picture."""
    across = f"l{BAR / 4:.1f} -7l{BAR / 4:.1f} 7" * 2 if torn else f"h{BAR:.1f}"
    return f"M{left:.1f} {bottom:.1f}V{top:.1f}{across}V{bottom:.1f}z"


def _legend(card):
    for left, (part, colour) in zip((4, 94, 192), PARTS.items(), strict=True):
        yield svg.fill(svg.boxes([(left, 7)], 15, 14), colour)
        yield svg.text(left + 21, 19, part, "start")
    yield svg.stroke(svg.line([(296, 14), (324, 14)]), svg.INK, 2, "6 4")
    yield svg.text(330, 19, f"usable: {card}", "start")


def _table(memory, usable, elements, sent):
    rows = (
        ("stage", [str(stage) for stage in STAGES]),
        ("cuts", CUT),
        ("left", [_signed(usable - states.total) for states in memory]),
        ("sends", [f"{count:.3g} Ψ" for count in elements]),
        ("", [format_bytes(size) for size in sent]),
    )
    for line, (name, cells) in enumerate(rows, start=1):
        y = BASE + line * ROW
        if name:
            yield svg.text(LEFT - 8, y, name, "end")
        for stage, cell in enumerate(cells):
            yield svg.text(LEFT + (stage + 0.5) * COLUMN, y, cell)


def _signed(size):
    return f"{'' if size >= 0 else '−'}{format_bytes(abs(size))}"


def _spoken(model):
    return _named(model, PARAMS[model])


PANEL = Panel(
    name="zero_ladder",
    title="ZeRO: bytes per GPU by stage, against a card",
    function=zero_ladder,
    sliders=(
        Slider("model", "Model", tuple(PARAMS), "7B", short, _spoken),
        Slider("n_gpus", "GPUs N", GPUS, 8, str, "{} GPUs".format),
        Slider("stage", "Stage", tuple(STAGES), 2, str, "stage {}".format),
        Slider(
            "recipe",
            "Bytes w+g+k",
            tuple(BYTE_RECIPES),
            "mixed-precision",
            _recipe,
            lambda name: f"{name}, {_recipe(name)} bytes",
        ),
        Slider("card", "Card", tuple(CARDS), "a100-40", str, str),
    ),
)
