"""The fastest layouts of a model on a cluster, and why one of your own loses against them.

The planner is loaded when it is first asked: loading costs a browser 0.2 s, also on the pages of
all other panels.
"""

from functools import lru_cache

from parlab import svg
from parlab.hardware import cluster as cluster_of
from parlab.panels.layout_rows import draw_rows, draw_table, layout_words
from parlab.panels.panel import Panel, Picture, Slider
from parlab.panels.sheet import MODELS, short
from parlab.units import format_seconds, require_choice, require_int

NAMES = ("llama-3-8b", "llama-3-70b", "mixtral-8x7b")
CLUSTERS = ("hgx-a100", "hgx-h100")  # nodes of 8 cards
GPUS, GPUS_PER_NODE = (8, 16, 32, 64), 8
DEGREES = (1, 2, 4, 8)
MOST_CUT = 8  # tp and cp that are tried: a larger one crosses the node
BEST = 3  # layouts that are shown
RECOMPUTE = ("none", "per-op", "full")
TABLE = 262
HEIGHT = 508


def choose_layout(
    model: str,
    cluster: str,
    n_gpus: int,
    global_batch: int,
    sequence: int,
    tp: int,
    pp: int,
    zero: int,
    micro_batch: int,
    recompute: str,
) -> Picture:
    """Draw the best layouts with their time and memory, and a chosen one with what is against it.

    All layouts with tp and cp up to 8 are considered. Shown are the best one and, of those that
    take at most 2% longer, the next two that cut the model in other ways. The chosen one has the
    rest of the GPUs as data-parallel ranks, over which experts are spread as far as they go, and
    sequence parallelism beside tp > 1.

    model: a name from NAMES. cluster: one from CLUSTERS, in nodes of 8. n_gpus: 8 to 64.
    global_batch: sequences of an iteration. sequence: tokens. The others as in `Layout`.

    >>> print(choose_layout("llama-3-70b", "hgx-h100", 8, 64, 8192, 8, 1, 0, 1, "full").sentence)
    N = 8 GPUs, no layout fits. Yours: needs 212 GB, the card has 84.9 GB: no single change makes it fit.
    """  # noqa: E501
    model = require_choice("model", model, NAMES)
    cluster = require_choice("cluster", cluster, CLUSTERS)
    found = _search(model, cluster, n_gpus, sequence, global_batch)
    layout = _layout(MODELS[model], n_gpus, tp, pp, zero, micro_batch, recompute)
    nodes = _nodes(cluster, n_gpus)
    chosen = _estimate(MODELS[model], nodes, layout, sequence, global_batch)
    sentence = _sentence(n_gpus, found, layout)
    marks = [
        *draw_rows(_best(found), layout, chosen, nodes.gpu.usable_bytes, cluster),
        *draw_table(found.best, chosen, TABLE),
    ]
    title = f"Layouts of {model} on {n_gpus} GPUs of {cluster}, the best beside a chosen one"
    return Picture(svg.document(HEIGHT, marks, title, sentence), sentence)


@lru_cache(maxsize=64)
def _search(model, cluster, n_gpus, sequence, global_batch):
    from parlab.planner.search import search

    task = (MODELS[model], _nodes(cluster, n_gpus), sequence, global_batch)
    return search(*task, most_tp=MOST_CUT, most_cp=MOST_CUT)


@lru_cache(maxsize=16)
def _nodes(cluster, n_gpus):
    if require_int("n_gpus", n_gpus, minimum=1, maximum=GPUS[-1]) % GPUS_PER_NODE:
        raise ValueError(f"n_gpus must be full nodes of {GPUS_PER_NODE}, got {n_gpus}")
    return cluster_of(cluster, n_gpus // GPUS_PER_NODE)


def _layout(config, n_gpus, tp, pp, zero, micro_batch, recompute):
    """The chosen layout; what tp and pp leave of the GPUs is data parallel."""
    from parlab.planner.layout import Layout

    if n_gpus % (require_int("tp", tp, minimum=1) * require_int("pp", pp, minimum=1)):
        raise ValueError(f"tp x pp must divide n_gpus = {n_gpus}, got {tp} x {pp}")
    dp = n_gpus // (tp * pp)
    ep = max(n for n in range(1, config.experts + 1) if config.experts % n == 0 and dp % n == 0)
    return Layout(
        dp=dp,
        tp=tp,
        pp=pp,
        ep=ep,
        zero=zero,
        micro_batch=micro_batch,
        recompute=recompute,
        sequence_parallel=tp > 1,
    )


def _estimate(config, nodes, layout, sequence, global_batch):
    """The Estimate of a layout, None where a rule forbids it."""
    from parlab.planner.estimate import estimate
    from parlab.planner.layout import refusal

    if refusal(config, nodes.n_gpus, layout, sequence, global_batch):
        return None
    return estimate(config, nodes, layout, sequence, global_batch)


def _best(found):
    """The fastest Estimates of a search that cut the model in different ways."""
    kinds = {}
    for made in found.near_ties:
        a = made.layout
        kinds.setdefault((a.tp, a.pp, a.cp, a.ep, a.chunks, a.schedule), made)
    return list(kinds.values())[:BEST]


def _sentence(n_gpus, found, layout):
    best = "no layout fits"
    if found.best:
        words, seconds = layout_words(found.best.layout), format_seconds(found.best.seconds)
        best = f"best is {words}: {seconds}, MFU {found.best.mfu:.1%}"
    return f"N = {n_gpus} GPUs, {best}. Yours: {_lower(found.why_not(layout))}"


def _lower(sentence):
    return sentence[0].lower() + sentence[1:]


def _n_degrees(values, *others):
    left = values["n_gpus"]
    for other in others:
        left //= values[other]
    return sum(degree <= left for degree in DEGREES)


PANEL = Panel(
    name="choose_layout",
    title="The best layouts, and yours",
    function=choose_layout,
    sliders=(
        Slider("model", "Model", NAMES, "llama-3-70b", short, str),
        Slider("cluster", "Cluster", CLUSTERS, "hgx-h100", str, str),
        Slider("n_gpus", "GPUs N", GPUS, 64, str, "{} GPUs".format),
        Slider(
            "global_batch",
            "Batch",
            (32, 64, 128, 256, 512, 1024),
            256,
            str,
            "{} sequences an iteration".format,
        ),
        Slider(
            "sequence",
            "Sequence s",
            (2048, 4096, 8192, 16384, 32768),
            8192,
            str,
            "{} tokens".format,
        ),
        Slider(
            "tp",
            "Your TP",
            DEGREES,
            8,
            str,
            "{} GPUs share a layer".format,
            count=lambda values: _n_degrees(values),
        ),
        Slider(
            "pp",
            "Your PP",
            DEGREES,
            2,
            str,
            "{} stages".format,
            count=lambda values: _n_degrees(values, "tp"),
        ),
        Slider("zero", "Your ZeRO", (0, 1, 2, 3), 1, str, "stage {}".format),
        Slider("micro_batch", "Your b", (1, 2, 4, 8), 1, str, "{} sequences".format),
        Slider(
            "recompute",
            "Recompute",
            RECOMPUTE,
            "none",
            str,
            str,
        ),
    ),
)
