"""The tensors that one layer keeps for backward, the embedding and the head: names and sizes.

s is the sequence, b the micro-batch, h hidden, a heads, k kv_heads, d their size, f ffn, V the
vocabulary, E experts, of which a token visits e, t the ranks of tensor parallelism.
"""

from functools import cache, lru_cache, partial
from math import ceil
from operator import mul
from typing import NamedTuple

from parlab.models import ModelConfig
from parlab.units import require_bool, require_choice, require_int, require_number

RECOMPUTE = ("none", "selective", "full", "per-op")


def maker(record):
    """Return what makes a NamedTuple of one tuple, in half the time of its own constructor."""
    return partial(tuple.__new__, record)


def ask(cached, arguments):
    """Call a function that remembers its answers; what has no hash it checks itself."""
    try:
        return cached(*arguments)
    except TypeError:
        return cached.__wrapped__(*arguments)


class Sizes(NamedTuple):
    """Elements of a layer's tensors on one rank, with one micro-batch."""

    tokens: int  # s b
    whole: int  # s b h
    wide: int  # s b h, cut by sequence parallelism
    queries: int  # s b a d / t
    keys: int  # s b k d / t
    rows: int  # s b a / t, of the scores
    scores: int  # s^2 b a / t
    inner: int  # s b f / t: one tensor inside the MLP, or inside all experts of this rank
    probabilities: int  # s b E, cut
    chosen: int  # s b e, cut
    routed: int  # h for every copy of a token that comes to this rank's experts


class Kind(NamedTuple):
    """What decides which tensors a layer keeps."""

    gated: bool
    has_experts: bool
    cut: bool  # sequence parallelism
    dropout: bool
    flash: bool


_make_sizes = maker(Sizes)


def layer_sizes(config, micro_batch, sequence, tp, sequence_parallel, dropout, flash, expert_load):
    """Check all that a layer's tensors depend on; return their Sizes, and Kind as a plain tuple."""
    h, a, kv, d, f, gated, experts, active = _shape(config)
    b = require_int("micro_batch", micro_batch, minimum=1)
    s = require_int("sequence", sequence, minimum=1)
    t = require_int("tp", tp, minimum=1)
    load = require_number("expert_load", expert_load, minimum=1)
    cut = t if require_bool("sequence_parallel", sequence_parallel) else 1
    require_bool("dropout", dropout)
    require_bool("flash", flash)
    if t > 1:
        for name, size in (("heads", a), ("kv_heads", kv), ("ffn", f)):
            if size % t:
                raise ValueError(f"tp must divide {name} = {size}, got {t}: ranks hold equal parts")
        if s % cut:
            raise ValueError(f"tp must divide the sequence of {s} tokens, got {t}: it is cut too")
    tokens = inside = s * b
    rows = tokens * (a // t)
    here = chosen = copies = 0
    if experts > 1:
        here = tokens // cut
        chosen = here * active
        copies = ceil(load * chosen)
        # Experts see the copies of all ranks that cut the sequence, each a part of every inside.
        inside = copies * cut
    sizes = (
        tokens,
        tokens * h,
        tokens // cut * h,
        rows * d,
        tokens * d * (kv // t),
        rows,
        rows * s,
        inside * (f // t),
        here * experts,
        chosen,
        copies * h,
    )
    return _make_sizes(sizes), (gated, experts > 1, cut > 1, dropout, flash)


def layer_tensors(sizes, kind, recompute):
    """Return (block, tensor, bytes) of all that one layer keeps."""
    return [
        (block, tensor, each * sizes[size]) for block, tensor, each, size in _table(kind, recompute)
    ]


def layer_bytes(sizes, kind, recompute):
    """Return the bytes of these tensors together."""
    return sum(map(mul, sizes, _bytes_of_each_size(kind, recompute)))


def recomputed_bytes(sizes, kind, recompute, kept_bytes):
    """Return what a layer holds in its backward beyond what it kept in forward."""
    again = layer_bytes(sizes, kind, "none") - kept_bytes
    if recompute == "per-op":  # keeps some results that no gradient needs
        kind = Kind(*kind)
        again += 2 * sizes.whole * kind.gated + 4 * sizes.wide * kind.cut
    return again


class LayerStep(NamedTuple):
    """One layer in a training step with one micro-batch, in bytes on one rank."""

    sizes: Sizes
    kept: int  # from forward to backward
    again: int  # what recomputation brings back, while the layer is at work
    inside: int  # gradients of the tensors inside the layer


_make_layer_step = maker(LayerStep)


@lru_cache(maxsize=1024, typed=True)  # a search asks for the same ones over and over
def layer_step(
    config,
    micro_batch,
    sequence,
    tp,
    sequence_parallel,
    dropout,
    flash,
    expert_load,
    recompute,
):
    """Return the LayerStep of arguments that `layer_sizes` checks."""
    recompute = require_choice("recompute", recompute, RECOMPUTE)
    sizes, kind = layer_sizes(
        config, micro_batch, sequence, tp, sequence_parallel, dropout, flash, expert_load
    )
    kept = layer_bytes(sizes, kind, recompute)
    again = 0 if recompute == "none" else recomputed_bytes(sizes, kind, recompute, kept)
    inside = 2 * (sizes.wide + sizes.routed) + (4 if config.gated else 2) * sizes.inner
    return _make_layer_step((sizes, kept, again, inside))


def embedding_mask(sizes, pipeline, chunks):
    """Return (block, tensor, bytes) of the first rank's embedding, whose only memory is dropout's.

    A chunk has p micro-batches in flight; with several, the first p - 1 more of the next round.
    """
    micro_batches = pipeline if chunks == 1 else 2 * pipeline - 1
    return ("embedding", "dropout mask", micro_batches * sizes.wide)


def head_tensors(sizes, vocab):
    """Return (block, tensor, bytes) of what the head keeps for one micro-batch; vocab: V / t."""
    logits = sizes.tokens * vocab
    return [
        ("head", "input of the last norm", 2 * sizes.wide),
        ("head", "input of the head", 2 * sizes.wide),
        ("head", "logits, 16 bits", 2 * logits),
        ("head", "logits, fp32", 4 * logits),
    ]


def vocab_share(vocab, tp):
    """Return V / t, or say that it must be whole."""
    if vocab % tp:
        raise ValueError(f"tp must divide vocab = {vocab}, got {tp}: pad the vocabulary")
    return vocab // tp


@cache
def _table(kind, recompute):
    """Return (block, tensor, bytes of an element, index in Sizes) of all that one layer keeps."""
    rows = _kept(Kind(*kind), recompute)
    return [(block, tensor, each, Sizes._fields.index(size)) for block, tensor, each, size in rows]


@cache
def _bytes_of_each_size(kind, recompute):
    """Return the bytes by which each of Sizes counts in a layer's total."""
    total = [0] * len(Sizes._fields)
    for _, _, each, size in _table(kind, recompute):
        total[size] += each
    return total


def _kept(kind, recompute):
    """Return (block, tensor, bytes of an element, which of Sizes) of all that one layer keeps."""
    if recompute == "full":
        return [("layer", "input", 2, "wide")]
    if recompute == "per-op":
        return _every_second_product(kind)
    mask = [("attention", "dropout mask", 1, "wide")] if kind.dropout else []
    return [
        ("attention", "input of queries, keys, values", 2, "wide"),
        ("attention", "queries", 2, "queries"),
        ("attention", "keys", 2, "keys"),
        *(_scores(kind) if recompute == "none" else []),
        ("attention", "values", 2, "keys"),
        ("attention", "input of the projection", 2, "queries"),
        *mask,
        *(_experts(kind) if kind.has_experts else _mlp(kind)),
        *[("MLP", *item[1:]) for item in mask],
        ("norms", "input of the first", 2, "wide"),
        ("norms", "input of the second", 2, "wide"),
    ]


_LOG_SUM_EXP = ("attention", "log-sum-exp of the scores", 4, "rows")


def _scores(kind):
    if kind.flash:
        return [_LOG_SUM_EXP]
    kept = [("attention", "softmax output", 2, "scores")]
    if kind.dropout:
        kept.append(("attention", "softmax dropout mask", 1, "scores"))
        kept.append(("attention", "softmax after dropout", 2, "scores"))
    return kept


def _mlp(kind):
    first = "input of gate and up" if kind.gated else "input of the first matrix"
    return [("MLP", first, 2, "wide"), *_inside("MLP", kind.gated)]


def _inside(block, gated):
    names = ("input of GeLU", "input of the second matrix")
    if gated:
        names = ("gate before SiLU", "gate after SiLU", "up", "input of down")
    return [(block, name, 2, "inner") for name in names]


def _experts(kind):
    return [
        ("experts", "input of the router", 2, "wide"),
        ("experts", "probabilities, fp32", 4, "probabilities"),
        ("experts", "weights of the sum", 2, "chosen"),
        ("experts", "copies of tokens", 2, "routed"),
        *_inside("experts", kind.gated),
        ("experts", "outputs before the sum", 2, "routed"),
    ]


def _every_second_product(kind):
    if kind.has_experts:
        raise ValueError("recompute must not be per-op with experts: their products have no order")
    kept = [
        ("layer", "input", 2, "wide"),
        ("attention", "queries", 2, "queries"),
        ("attention", "values", 2, "keys"),
    ]
    if kind.flash:
        kept += [_LOG_SUM_EXP, ("attention", "input of the projection", 2, "queries")]
    kept.append(("MLP", "gate before SiLU" if kind.gated else "input of GeLU", 2, "inner"))
    if kind.gated:
        kept.append(("MLP", "output of down", 2, "whole"))
    if kind.cut:
        kept += [(block, "sum over the ranks", 2, "wide") for block in ("attention", "MLP")]
    return kept


def _shape(config):
    if isinstance(config, ModelConfig):  # its sizes were checked when it was made
        return config.layer_shape
    names = ("hidden", "heads", "kv_heads", "ffn")
    for name in ("layers", *names, "gated"):
        if not hasattr(config, name):
            raise TypeError(f"config must have {name}, as a ModelConfig has, got {config!r:.60}")
    require_int("layers", config.layers, minimum=1)
    h, a, kv, f = [require_int(name, getattr(config, name), minimum=1) for name in names]
    require_bool("gated", config.gated)
    if a % kv:
        raise ValueError(f"kv_heads must divide heads = {a}, got {kv}: groups are equal")
    head_size = getattr(config, "head_size", None)
    if head_size is None:
        if h % a:
            raise ValueError(f"heads must divide hidden = {h}, got {a}: heads are equal")
        head_size = h // a
    experts = require_int("experts", getattr(config, "experts", 1), minimum=1)
    active = getattr(config, "active_experts", 1)
    active = require_int("active_experts", active, minimum=1, maximum=experts)
    return h, a, kv, head_size, f, config.gated, experts, active
