"""How unevenly ranks are loaded: counted from a routing, drawn at random, estimated.

A layer is done when its busiest rank is, so its time grows by the imbalance: the busiest rank's
copies over the mean. T is the tokens of a group of ranks, E the experts, e how many a token visits.
"""

import math

import numpy as np

from parlab.expert_parallel.routing import expert_counts
from parlab.units import require_int

MOST_DRAWS = 10**8  # a few seconds, and 0.8 GB if in one trial


def rank_counts(counts, ep):
    """Return the copies that come to each of ep ranks, which hold the experts in their order.

    >>> rank_counts([3, 1, 0, 4], 2).tolist()
    [4, 4]
    """
    counts = np.asarray(counts)
    ep = require_int("ep", ep, minimum=1)
    if counts.ndim != 1:
        raise ValueError(f"counts must be one number an expert, got shape {counts.shape}")
    if len(counts) % ep:
        raise ValueError(f"ep must divide the {len(counts)} counts of experts, got {ep}")
    return counts.reshape(ep, -1).sum(axis=1)


def copies_between(chosen_by_rank, experts, kept_by_rank=None):
    """Return the copies that rank src's tokens send to rank dst's experts, (ep, ep) of integers.

    chosen_by_rank: one (T_r, e) a rank. kept_by_rank: their kept copies, None keeps all.

    >>> copies_between([[[0, 1]], [[0, 3]]], 4).tolist()
    [[2, 0], [1, 1]]
    """
    chosen_by_rank = list(chosen_by_rank)
    n = len(chosen_by_rank)
    kept_by_rank = [None] * n if kept_by_rank is None else kept_by_rank
    pairs = zip(chosen_by_rank, kept_by_rank, strict=True)
    return np.array([rank_counts(expert_counts(c, experts, k), n) for c, k in pairs])


def imbalance(counts):
    """Return the largest count over the mean: 1 is even, and the number of counts is the worst.

    >>> imbalance([30, 10, 10, 10])
    2.0
    """
    counts = np.asarray(counts)
    if not counts.sum() > 0:
        raise ValueError(f"counts must have a sum above 0, got {counts.tolist()}")
    return float(counts.max() / counts.mean())


def random_imbalance(tokens, experts, active, ep, *, trials=100, seed=0):
    """Return the mean imbalance of ep ranks over trials in which every token visits e of E experts.

    All sets of e experts are equally likely, so what remains is chance alone.

    >>> random_imbalance(512, 8, 2, 8, trials=20) > 1.05
    True
    """
    tokens, experts, active, ep = _sizes(tokens, experts, active, ep)
    trials = require_int("trials", trials, minimum=1)
    draws = tokens * experts * trials
    require_int("tokens x experts x trials", draws, maximum=MOST_DRAWS, why="each is drawn")
    rng = np.random.default_rng(seed)
    total = 0.0
    for _ in range(trials):
        chosen = np.argpartition(rng.random((tokens, experts)), active - 1, axis=1)[:, :active]
        total += imbalance(rank_counts(np.bincount(chosen.ravel(), minlength=experts), ep))
    return total / trials


def expected_imbalance(tokens, experts, active, ep):
    """Estimate `random_imbalance`: 1 + m sqrt((E-e)/(E-1) / mean), mean = T e / ep copies a rank.

    A token brings a rank a hypergeometric number of copies, of variance
    e/ep (1 - 1/ep) (E-e)/(E-1); many tokens make loads normal, and they sum to a constant. So they
    are as far from their mean as ep independent normals of that variance, without the factor
    1 - 1/ep, from theirs; m is the expected maximum of ep standard ones. Good for many tokens.

    >>> round(expected_imbalance(4096, 8, 2, 8), 3)
    1.041
    """
    tokens, experts, active, ep = _sizes(tokens, experts, active, ep)
    if active == experts:
        return 1.0
    mean = tokens * active / ep
    spread = math.sqrt((experts - active) / (experts - 1) / mean)
    return 1 + spread * _largest_of_normals(ep)


def balls_in_bins_imbalance(balls, bins):
    """The textbook's estimate: 1 + sqrt(2 ln n / mean) with mean = m/n, for m balls in n bins.

    Raab and Steger (1998), theorem 1, for m much larger than n ln n: the leading term only, which
    is too large while n is small.

    >>> round(balls_in_bins_imbalance(8192, 8), 3)
    1.064
    """
    balls = require_int("balls", balls, minimum=1)
    bins = require_int("bins", bins, minimum=1)
    return 1 + math.sqrt(2 * math.log(bins) * bins / balls)


def _sizes(tokens, experts, active, ep):
    tokens = require_int("tokens", tokens, minimum=1)
    experts = require_int("experts", experts, minimum=1)
    active = require_int("active", active, minimum=1, maximum=experts)
    ep = require_int("ep", ep, minimum=1)
    if experts % ep:
        raise ValueError(f"ep must divide experts = {experts}, got {ep}: ranks hold equally many")
    return tokens, experts, active, ep


def _largest_of_normals(n):
    """Return the expected maximum of n independent standard normals, the integral of x dF^n."""
    x = np.linspace(-12, 12, 4801)
    density = np.exp(-(x**2) / 2) / math.sqrt(2 * math.pi)
    below = np.array([math.erfc(-value / math.sqrt(2)) / 2 for value in x])
    return float((x * n * density * below ** (n - 1)).sum() * (x[1] - x[0]))
