"""Which experts a token visits, with what weights, and what a limited buffer drops.

T is the tokens, E the experts, e how many of them a token visits.
"""

import math
from typing import NamedTuple

import numpy as np

from parlab.units import require_bool, require_int, require_number


class Routing(NamedTuple):
    """What a router decided; the best expert of a token comes first.

    probabilities: softmax of all logits, (T, E). chosen: numbers of experts, (T, e). weights: by
    which their outputs count, (T, e). renormalised: whether these sum to 1.
    """

    probabilities: np.ndarray
    chosen: np.ndarray
    weights: np.ndarray
    renormalised: bool


class Balance(NamedTuple):
    """The auxiliary loss, and its gradient by the router's logits, (T, E)."""

    loss: float
    gradient: np.ndarray


def route(logits, active, *, renormalise=True):
    """Choose the e most probable experts of every token: softmax over all E, then top-k.

    Renormalised weights are p_i / (sum of the chosen p), as in Mixtral (arXiv 2401.04088,
    section 2.1). That is the softmax of the chosen logits alone, so "top-k, then softmax" says the
    same. Switch Transformer (arXiv 2101.03961, eq. 1 and 2) keeps p_i as it is: renormalised, the
    only weight of e = 1 would always be 1, and nothing would teach the router.

    logits: (T, E), finite. active: e, at most E. renormalise: False keeps p_i. Of equal logits the
    lower expert comes first.

    >>> routing = route(np.log([[0.5, 0.3, 0.2]]), 2)
    >>> routing.chosen.tolist(), routing.weights.round(3).tolist()
    ([[0, 1]], [[0.625, 0.375]])
    >>> route(np.log([[0.5, 0.3, 0.2]]), 2, renormalise=False).weights.round(3).tolist()
    [[0.5, 0.3]]
    """
    logits = np.asarray(logits, dtype=float)
    if logits.ndim != 2 or not np.isfinite(logits).all():
        raise ValueError(f"logits must be finite and (tokens, experts), got shape {logits.shape}")
    active = require_int("active", active, minimum=1, maximum=logits.shape[1])
    exponentials = np.exp(logits - logits.max(axis=1, keepdims=True))
    probabilities = exponentials / exponentials.sum(axis=1, keepdims=True)
    chosen = np.argsort(-logits, axis=1, kind="stable")[:, :active]
    weights = np.take_along_axis(probabilities, chosen, axis=1)
    if require_bool("renormalise", renormalise):
        weights = weights / weights.sum(axis=1, keepdims=True)
    return Routing(probabilities, chosen, weights, renormalise)


def route_backward(routing, d_weights):
    """Return the gradient by the logits, (T, E), of a loss whose gradient by the weights is given.

    Choosing is a step function: the experts that were not chosen get a gradient only through the
    denominator of a softmax over all of them, which renormalising removes.
    """
    d_logits = np.zeros_like(routing.probabilities)
    if routing.renormalised:  # the softmax of the chosen logits
        mean = (routing.weights * d_weights).sum(axis=1, keepdims=True)
        chosen = routing.weights * (d_weights - mean)
        np.put_along_axis(d_logits, routing.chosen, chosen, axis=1)
        return d_logits
    np.put_along_axis(d_logits, routing.chosen, d_weights, axis=1)
    return _softmax_backward(routing.probabilities, d_logits)


def load_balancing_loss(routing):
    """E sum_i f_i P_i: 1 where experts are used and meant evenly, E where one is all there is.

    f_i is the share of copies that go to expert i, P_i the mean of its probability. Fedus et al.
    (Switch Transformer, arXiv 2101.03961), eq. 4 to 6, without their factor alpha = 0.01; there
    e = 1. Some code takes f_i as a share of tokens, which is e times as much. f counts, so the
    gradient passes through P only. Returns a Balance.

    It is no distance from even use: where f and P differ, it can fall below 1.

    >>> load_balancing_loss(route(np.eye(4), 1)).loss
    1.0
    >>> load_balancing_loss(route([[800.0, 0, 0, 0]] * 4, 1)).loss
    4.0
    """
    tokens, experts = routing.probabilities.shape
    if not tokens:
        raise ValueError("routing must have at least one token: means over none do not exist")
    shares = expert_counts(routing.chosen, experts) / routing.chosen.size
    loss = experts * float(shares @ routing.probabilities.mean(axis=0))
    by_probability = np.broadcast_to(experts * shares / tokens, (tokens, experts))
    return Balance(loss, _softmax_backward(routing.probabilities, by_probability))


def expert_counts(chosen, experts, kept=None):
    """Return how many copies of tokens each of E experts gets, as integers.

    chosen: (T, e). kept: which of these copies are not dropped, (T, e) of bools; None keeps all.

    >>> expert_counts([[0, 2], [0, 1]], 4).tolist()
    [2, 1, 1, 0]
    """
    chosen = _require_chosen(chosen, require_int("experts", experts, minimum=1))
    return np.bincount(chosen[require_kept(kept, chosen)], minlength=experts)


def expert_capacity(tokens, experts, active, factor):
    """Return the copies that one expert has room for: ceil(factor T e / E).

    Fedus et al. (arXiv 2101.03961), eq. 3, there with e = 1. T are the tokens that share a buffer:
    of one rank in most code, so that a rank's tokens are dropped for its own excess.

    >>> expert_capacity(1024, 8, 2, 1.25)
    320
    """
    tokens = require_int("tokens", tokens, minimum=0)
    experts = require_int("experts", experts, minimum=1)
    active = require_int("active", active, minimum=1, maximum=experts)
    factor = require_number("factor", factor, minimum=0, exclusive=True)
    return math.ceil(factor * tokens * active / experts)


def within_capacity(chosen, experts, capacity):
    """Return which copies find room, (T, e) of bools: all first choices, then all second, ...

    In each round tokens come in their order (GShard, arXiv 2006.16668, algorithm 1). A dropped copy
    adds nothing to its token, and the residual connection carries the token on.

    >>> within_capacity([[0, 1], [0, 1], [1, 0]], 2, capacity=2).tolist()
    [[True, True], [True, False], [True, False]]
    """
    chosen = _require_chosen(chosen, require_int("experts", experts, minimum=1))
    capacity = require_int("capacity", capacity, minimum=0)
    in_turn = chosen.T.ravel()  # first choices of all tokens, then the second
    order = np.argsort(in_turn, kind="stable")
    counts = np.bincount(in_turn, minlength=experts)
    place = np.empty_like(in_turn)  # a copy's place in the queue of its expert
    place[order] = np.arange(in_turn.size) - np.repeat(np.cumsum(counts) - counts, counts)
    return (place < capacity).reshape(chosen.T.shape).T


def _softmax_backward(probabilities, gradient):
    mean = (probabilities * gradient).sum(axis=1, keepdims=True)
    return probabilities * (gradient - mean)


def _require_chosen(chosen, experts):
    chosen = np.asarray(chosen)
    if chosen.ndim != 2 or chosen.dtype.kind not in "iu":
        raise TypeError(
            f"chosen must be integers of shape (tokens, active), got {chosen.dtype} {chosen.shape}"
        )
    if chosen.size and not (chosen.min() >= 0 and chosen.max() < experts):
        raise ValueError(
            f"chosen must lie from 0 to {experts - 1}, got {chosen.min()} to {chosen.max()}"
        )
    ordered = np.sort(chosen, axis=1)
    if (ordered[:, 1:] == ordered[:, :-1]).any():
        raise ValueError("chosen must hold different experts for a token, got one twice")
    return chosen.astype(np.int64)


def require_kept(kept, chosen):
    """Return which copies are kept, all of them for None; ValueError for another shape."""
    if kept is None:
        return np.ones(chosen.shape, dtype=bool)
    kept = np.asarray(kept)
    if kept.dtype != bool or kept.shape != chosen.shape:
        raise ValueError(
            f"kept must be bools of chosen's shape {chosen.shape}, got {kept.dtype} {kept.shape}"
        )
    return kept
