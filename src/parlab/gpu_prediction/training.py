"""Bytes of a training step of the package's GPT under autocast, as eager PyTorch holds them.

`training_memory` counts activations as the papers do, with 16 bits an element. Eager PyTorch under
autocast holds more, and this module counts all of it: the sum that runs through the layers stays in
fp32, and every linear layer makes a 16-bit copy of its input for itself, queries, keys and values
one each. That is 40 sbh a layer where the paper's formula has 32 (GeLU, f = 4h, a fused attention
kernel, no dropout).
"""

from parlab.memory.moments import TrainingMemory
from parlab.models import ModelConfig
from parlab.units import require_bool, require_choice, require_int

COMPUTE = {"bf16": 2, "fp16": 2, "fp32": 4}  # bytes of an element in matrix products
RECOMPUTE = ("none", "full")


def autocast_layer(config, micro_batch, *, sequence, compute="bf16"):
    """Return (tensor, bytes) of all that one layer keeps for backward.

    T = s b tokens; 4 bytes where autocast leaves fp32, e where it computes in `compute`.

    >>> from parlab.models import model
    >>> kept = autocast_layer(model("gpt2"), 8, sequence=1024)
    >>> sbh = 1024 * 8 * 768
    >>> round(sum(size for _, size in kept) / sbh, 2), 40 * sbh
    (40.08, 251658240)
    """
    config, tokens, e = _checked(config, micro_batch, sequence, compute)
    wide, inner = tokens * config.hidden, tokens * config.ffn
    copies = 3 if e == 2 else 1  # fp32 needs no copy, and all three read the norm's own output
    what = "input of queries, keys, values"
    return [
        ("input of the first norm, fp32", 4 * wide),
        (what if copies == 1 else f"{what}, a copy each", copies * e * wide),
        ("queries", e * wide),
        ("keys", e * wide),
        ("values", e * wide),
        ("log-sum-exp of the scores", 4 * tokens * config.heads),
        ("input of the projection", e * wide),
        ("input of the second norm, fp32", 4 * wide),
        ("input of the first matrix", e * wide),
        ("input of GeLU", e * inner),
        ("input of the second matrix", e * inner),
        ("statistics of two norms", 16 * tokens),
    ]


def autocast_memory(
    config, micro_batch, *, sequence, recompute="none", compute="bf16", foreach=True
):
    """Bytes that one card holds in a step of AdamW under autocast, by item, at `MOMENTS`.

    "after the step": weights 4, gradients 4, AdamW's moments 8 bytes a parameter. "loss": forward
    has ended. "backward": where it is fullest, which is in the loss's own backward (three fp32
    tensors of the logits' size), or in the last or the first layer, or at the very end.
    "optimizer": inside its step. Gradients of the step before are freed when forward starts.

    config: a ModelConfig of GPT-2's kind, with kv_heads = heads and a tied head. micro_batch: b.
    sequence: s. recompute: "none", or "full" for `torch.utils.checkpoint` around each layer.
    compute: "bf16", "fp16" or "fp32", for matrix products; fp32 means no autocast.
    foreach: as in `training_memory`; True makes 4 bytes a parameter in the optimizer's step.

    Not in it: what an allocator adds to round sizes up, workspaces of libraries, and numbers, such
    as a loss, which take 512 bytes each on a card. In backward's first layer, and only if the
    weights of a layer are larger than its activations, a gradient's own copy may add a little.

    Returns a `TrainingMemory`. Raises ValueError or TypeError for what it cannot predict.

    >>> from parlab.models import model
    >>> step = autocast_memory(model("gpt2"), 8, sequence=1024)
    >>> step.totals
    (1991168000, 6451298816, 9744941568, 2488927232)
    >>> step.after_step - 16 * model("gpt2").n_params  # tokens and targets, 8 bytes each
    131072
    """
    config, tokens, e = _checked(config, micro_batch, sequence, compute)
    recompute = require_choice("recompute", recompute, RECOMPUTE)
    require_bool("foreach", foreach)
    psi, h, f, layers = config.n_params, config.hidden, config.ffn, config.layers
    table, logits, wide = config.vocab * h, tokens * config.vocab, tokens * h
    matrices = 4 * h * h + 2 * h * f  # of one layer; queries, keys, values, projection, MLP
    whole_layer = sum(
        size for _, size in autocast_layer(config, micro_batch, sequence=sequence, compute=compute)
    )
    kept = whole_layer if recompute == "none" else 4 * wide  # a layer's input
    casts = 2 * (table + matrices * layers * (recompute == "none")) if e == 2 else 0

    # Backward is fullest at one of these places; what they have in common stands in the rows.
    in_loss = {
        "layers": layers * kept,
        "last norm and head": (4 + e) * wide + 8 * tokens,
        "logits, fp32": 4 * logits,
        "gradients of the logits": 8 * logits,
        "casts of autocast": casts,
    }

    def in_layer(waiting):
        """In the MLP of a layer before which `waiting` layers have yet to go backward."""
        behind = layers - 1 - waiting
        place = {
            "gradients": 4 * (table + 2 * h + behind * config.layer_params),
            "layers": (waiting + 1) * kept,
            # Of the sum that runs through the layers, of the MLP's output and inside, and of its
            # last matrix.
            "gradients inside a layer": (6 if e == 2 else 4) * wide + e * (tokens * f + f * h),
        }
        if e == 4 or recompute == "none":
            place["gradients inside a layer"] += e * h  # of a bias
        if recompute == "full":
            place["recomputed layer"] = whole_layer - kept
        if e == 2:
            cast = 1 if recompute == "full" else waiting + 1
            place["casts of autocast"] = 2 * matrices * cast
        return place

    at_end = {"gradients": 4 * psi, "gradients inside a layer": 4 * (wide + table)}
    places = (in_loss, in_layer(layers - 1), in_layer(0), at_end)
    fullest = max(places, key=lambda place: sum(place.values()))

    rows = [
        ("weights", "states", (4 * psi,) * 4),
        ("gradients", "states", (4 * psi, 0, fullest.get("gradients", 0), 4 * psi)),
        ("optimizer", "states", (8 * psi,) * 4),
        ("tokens and targets", "activations", (16 * tokens,) * 4),
    ]
    groups = {
        "layers": "activations",
        "recomputed layer": "activations",
        "last norm and head": "activations",
        "logits, fp32": "activations",
        "gradients of the logits": "activations",
        "gradients inside a layer": "activations",
        "casts of autocast": "on top",
    }
    for name, group in groups.items():
        loss = 0 if name == "gradients of the logits" else in_loss.get(name, 0)
        if loss or fullest.get(name, 0):
            rows.append((name, group, (0, loss, fullest.get(name, 0), 0)))
    if foreach:
        rows.append(("temporaries of foreach", "on top", (0, 0, 0, 4 * psi)))
    return TrainingMemory.of_rows(rows)


def training_items(config, micro_batch, *, sequence, recompute="none", compute="bf16"):
    """The same step as {item: bytes}, in the items that two readings of a gauge can tell apart.

    "behind the layers" is what forward has added when it leaves them: their activations, the sum
    that runs through, and 16-bit casts of their weights and biases. "kept for backward" is what
    forward leaves in the end: activations, logits and casts of matrices. "gradients of the
    logits" is what backward needs beyond that at its fullest moment, whatever it is. The other
    items are those of `autocast_memory`.

    >>> from parlab.models import model
    >>> for item in training_items(model("gpt2"), 8, sequence=1024).items():
    ...     print(*item)
    weights 497759232
    gradients 497759232
    optimizer 995518464
    behind the layers 3221391360
    kept for backward 4957890048
    gradients of the logits 3293642752
    temporaries of foreach 497759232
    """
    step = autocast_memory(
        config, micro_batch, sequence=sequence, recompute=recompute, compute=compute
    )
    after, loss, backward, optimizer = step.totals
    psi, layers, wide = config.n_params, config.layers, micro_batch * sequence * config.hidden
    layer = autocast_layer(config, micro_batch, sequence=sequence, compute=compute)
    kept = sum(size for _, size in layer) if recompute == "none" else 4 * wide
    norms = 4 * config.hidden  # parameters of a layer that no product reads
    casts = 2 * layers * (config.layer_params - norms) if COMPUTE[compute] == 2 else 0
    return {
        "weights": 4 * psi,
        "gradients": 4 * psi,
        "optimizer": 8 * psi,
        "behind the layers": layers * kept + 4 * wide + casts,
        "kept for backward": loss - (after - 4 * psi),
        "gradients of the logits": backward - loss,
        "temporaries of foreach": optimizer - after,
    }


def activation_line(config, *, sequence, recompute="none", compute="bf16"):
    """Return (fixed bytes, bytes a sequence) of the peak as a line over the micro-batch b.

    Where the loss's backward is fullest, the peak is fixed + slope b: weights, moments and casts,
    and what every sequence brings. A sweep over b measures both.

    >>> from parlab.models import model
    >>> fixed, slope = activation_line(model("gpt2"), sequence=1024)
    >>> fixed + 8 * slope == autocast_memory(model("gpt2"), 8, sequence=1024).peak
    True
    """
    one, two = (
        autocast_memory(config, b, sequence=sequence, recompute=recompute, compute=compute).totals[
            2
        ]
        for b in (1024, 1025)
    )
    return one - 1024 * (two - one), two - one


def _checked(config, micro_batch, sequence, compute):
    if not isinstance(config, ModelConfig):
        raise TypeError(f"config must be a ModelConfig, got {config!r:.60}")
    plain = config.norm == "layer" and not config.gated and config.experts == 1 and config.tied
    if not (plain and config.positions and config.kv_heads == config.heads):
        raise ValueError(
            "config must be of GPT-2's kind (learned positions, LayerNorm, GeLU, a tied head, as "
            f"many kv_heads as heads), got {config}: that is what parlab's GPT holds"
        )
    b = require_int("micro_batch", micro_batch, minimum=1)
    why = "no position was learned for a later token"
    s = require_int("sequence", sequence, minimum=1, maximum=config.positions, why=why)
    return config, s * b, COMPUTE[require_choice("compute", compute, COMPUTE)]
