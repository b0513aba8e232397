"""Exercises of chapter 3: a gated MLP with packed weights, and a loss over a cut vocabulary."""

import math

import numpy as np

from parlab.exercises.records import Case, Exercise, Misconception

ORDER_OF_SUMS = "partial sums are added in another order"


def packed_swiglu_mlp(x, gate_up, down, n):
    """Return (silu(x G) * (x U)) D from n ranks, where gate_up is packed as [G | U].

    silu(z) = z / (1 + exp(-z)), entry by entry. Each rank gets the same block of columns of G and
    of U, and these rows of D; one sum over the ranks at the end.

    x: (rows, h). gate_up: (h, 2f). down: (f, h). n divides f.

    >>> packed, down = np.array([[1.0, 2.0, 3.0, 4.0]]), np.ones((2, 1))
    >>> packed_swiglu_mlp(np.ones((1, 1)), packed, down, 2).round(5).tolist()
    [[9.23955]]
    """
    gate, up = np.split(gate_up, 2, axis=1)
    shards = zip(np.split(gate, n, axis=1), np.split(up, n, axis=1), np.split(down, n), strict=True)
    total = 0
    for g, u, d in shards:
        z = x @ g
        total = total + z / (1 + np.exp(-z)) * (x @ u) @ d
    return total


def vocabulary_parallel_cross_entropy(logit_shards, target):
    """Return -log softmax(logits)[target] of one token, its logits cut over the ranks.

    loss = log(sum of exp(l - M)) + M - l[target], with M the largest logit of all: without it exp
    overflows. Ranks exchange single numbers, never their logits.

    logit_shards: rank i's logits, (v_i,), in rank order. target: its place in the whole vocabulary.

    >>> shards = [np.array([1000.0, 0.0]), np.array([-1000.0, 999.0])]
    >>> round(vocabulary_parallel_cross_entropy(shards, 1), 4)
    1000.3133
    """
    largest = max(shard.max() for shard in logit_shards)
    total = sum(np.exp(shard - largest).sum() for shard in logit_shards)
    start = 0
    for shard in logit_shards:
        if start <= target < start + len(shard):
            of_target = shard[target - start]
        start += len(shard)
    return float(np.log(total) + largest - of_target)


# Independent routes.


def _silu(z):
    return np.array([v / (1 + math.exp(-v)) for v in z.ravel().tolist()]).reshape(z.shape)


def _sigmoid(z):
    return np.array([1 / (1 + math.exp(-v)) for v in z.ravel().tolist()]).reshape(z.shape)


def _expect_swiglu(x, gate_up, down, n=1, gating=_silu):
    f = len(down)
    return (gating(x @ gate_up[:, :f]) * (x @ gate_up[:, f:])) @ down


def _expect_loss(logit_shards, target):
    logits = [v for shard in logit_shards for v in shard.tolist()]
    top = max(logits)
    return math.log(math.fsum(math.exp(v - top) for v in logits)) + (top - logits[target])


def _draw_swiglu(rng):
    n = int(rng.integers(2, 5))
    rows, h, f = int(rng.integers(1, 4)), int(rng.integers(1, 4)), n * int(rng.integers(1, 3))
    shapes = ((rows, h), (h, 2 * f), (f, h))
    return *(rng.normal(size=shape).round(2) for shape in shapes), n


def _draw_loss(rng):
    sizes = rng.integers(2, 5, int(rng.integers(2, 5)))
    scale = rng.choice([1.0, 500.0])
    logits = (scale * rng.normal(size=sizes.sum())).round(2)
    shards = np.split(logits, np.cumsum(sizes)[:-1])
    # Not a largest one: its loss may be next to nothing, a difference of two large numbers.
    smaller = np.concatenate([shard < shard.max() for shard in shards])
    return shards, int(rng.choice(np.flatnonzero(smaller)))


# Known mistakes.


def _contiguous(x, gate_up, down, n):
    """Every rank halves a contiguous block of the packed matrix."""
    parts = zip(np.split(gate_up, n, axis=1), np.split(down, n), strict=True)
    return sum(_expect_swiglu(x, block, rows) for block, rows in parts)


def _swapped(x, gate_up, down, n):
    gate, up = np.split(gate_up, 2, axis=1)
    return _expect_swiglu(x, np.hstack([up, gate]), down)


def _loss(total, back=None):
    """A way from its sum over the shards, and what it adds for the maximum."""

    def compute(logit_shards, target):
        of_target = np.concatenate(logit_shards)[target]
        added = back(logit_shards) if back else max(shard.max() for shard in logit_shards)
        return float(np.log(total(logit_shards)) + added - of_target)

    return compute


def _own_maxima(logit_shards):
    return sum(np.exp(shard - shard.max()).sum() for shard in logit_shards)


def _global_maximum(logit_shards):
    top = max(shard.max() for shard in logit_shards)
    return sum(np.exp(shard - top).sum() for shard in logit_shards)


def _no_maximum(logit_shards, target):
    logits = np.concatenate(logit_shards)
    with np.errstate(over="ignore", divide="ignore"):
        return float(np.log(np.exp(logits).sum()) - logits[target])


def _own_shard_only(logit_shards, target):
    start = 0
    for shard in logit_shards:
        if target < start + len(shard):
            return _expect_loss([shard], target - start)
        start += len(shard)


def _sum_of_ranks(logit_shards, target):
    """Each rank's own log-sum-exp, added up."""
    sums = [_expect_loss([shard], 0) + shard[0] for shard in logit_shards]
    return float(sum(sums) - np.concatenate(logit_shards)[target])


PACKED_SWIGLU_MLP = Exercise(
    chapter=3,
    solution=packed_swiglu_mlp,
    expect=_expect_swiglu,
    route="unsharded, entry by entry",
    draw=_draw_swiglu,
    cases=(
        Case(
            (np.ones((1, 1)), np.array([[1.0, 2.0, 3.0, 4.0]]), np.ones((2, 1)), 2),
            np.array([[3 / (1 + math.exp(-1)) + 8 / (1 + math.exp(-2))]]),
            "Megatron-LM 7464: 9.23955",
        ),
    ),
    misconceptions=(
        Misconception(
            "the packed matrix is cut as one block",
            (_contiguous,),
            "A contiguous block of [G | U] may be all gate or all up, so ranks pair a gate with "
            "another gate: 12.89301 instead of 9.23955. It also makes n divide 2f, not f.",
            "Take the two halves apart before you cut.",
        ),
        Misconception(
            "gate and up are exchanged",
            (_swapped,),
            "silu acts on the gate, the first half; the second half is the factor.",
            "Which of the two products goes through silu?",
        ),
        Misconception(
            "the sigmoid instead of silu",
            (lambda x, gate_up, down, n: _expect_swiglu(x, gate_up, down, n, _sigmoid),),
            "silu(z) is z times the sigmoid of z.",
            "Compare your function with the docstring at z = 0 and at z = 2.",
        ),
        Misconception(
            "the gate has no activation",
            (lambda x, gate_up, down, n: _expect_swiglu(x, gate_up, down, n, lambda z: z),),
            "Without silu the gate is only a product.",
            "What happens to x G before it is multiplied?",
        ),
    ),
    tolerance=1e-9,
    why_tolerance=ORDER_OF_SUMS,
)

VOCABULARY_PARALLEL = Exercise(
    chapter=3,
    solution=vocabulary_parallel_cross_entropy,
    expect=_expect_loss,
    route="all logits in one list, math.fsum",
    draw=_draw_loss,
    cases=(
        Case(([np.zeros(4), np.zeros(4)], 5), math.log(8), "8 equal logits: ln 8"),
        Case(
            ([np.array([1000.0, 0.0]), np.array([-1000.0, 999.0])], 1),
            1000 + math.log1p(math.exp(-1)),
            "transformers 48307: 1000.3133",
        ),
    ),
    misconceptions=(
        Misconception(
            "each rank takes off its own largest logit",
            (
                _loss(_own_maxima),
                _loss(_own_maxima, back=lambda shards: shards[0].max()),
                _loss(_own_maxima, back=lambda shards: sum(shard.max() for shard in shards)),
            ),
            "exp(l - M) of different ranks can only be added if M is the same for all: their "
            "maximum is an all-reduce of its own.",
            "What must ranks agree on before they add up?",
        ),
        Misconception(
            "the largest logit is not taken off",
            (_no_maximum,),
            "exp(710) is infinite in float64, and exp(89) in float32. Taking off the largest "
            "changes nothing but the range.",
            "Try a logit of 1000.",
        ),
        Misconception(
            "the largest logit is not put back",
            (_loss(_global_maximum, back=lambda shards: 0.0),),
            "log(sum of exp(l - M)) is M too small; the target's logit has not been shifted.",
            "Shift the target's logit too, or add M.",
        ),
        Misconception(
            "the sum stays on the target's rank",
            (_own_shard_only,),
            "All logits are in the denominator, those of the other ranks as well.",
            "Which two numbers must be added over the ranks?",
        ),
        Misconception(
            "logarithms of the ranks are added",
            (_sum_of_ranks,),
            "The log of a sum is not the sum of logs.",
            "Add up first, and take the logarithm once.",
        ),
        Misconception(
            "the sign is wrong",
            (lambda shards, target: -_expect_loss(shards, target),),
            "The loss is minus the log of the probability, and never negative.",
            "What is the loss of a token with probability 1/8?",
        ),
    ),
    tolerance=1e-9,
    why_tolerance=ORDER_OF_SUMS,
)

EXERCISES = (PACKED_SWIGLU_MLP, VOCABULARY_PARALLEL)
