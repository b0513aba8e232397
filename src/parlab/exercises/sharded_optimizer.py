"""The exercise of chapter 4 on real processes: an optimizer whose state is sharded (ZeRO 1)."""

import numpy as np

from parlab.exercises.data_parallel import ORDER_OF_SUMS, SUMMED
from parlab.exercises.records import Case, Exercise, Misconception

N_RANKS = 2


def sharded_optimizer_step(weights, gradients, momenta, lr):
    """One step of an optimizer of which each rank holds a slice: ZeRO's stage 1.

    Reduce-scatter the gradients, so that each rank has the ranks' mean of its slice; update the
    slice, momentum = 0.9 momentum + gradient and weights -= lr * momentum; all-gather the weights.

    weights: (k,), the same on all ranks. gradients: one of shape (k,) per rank; a rank may use its
    own only. momenta: one slice per rank, of ceil(k / n) elements: where the n ranks do not divide
    k, weights and gradients are thought filled up with zeros. lr: learning rate.

    Returns (weights, momentum): all k new weights, and this rank's new slice of the momentum.

    >>> import torch
    >>> from parlab import run_ranks
    >>> gradients, momenta = [torch.ones(3), 3 * torch.ones(3)], [torch.zeros(2)] * 2
    >>> run_ranks(sharded_optimizer_step, 2, args=(torch.ones(3), gradients, momenta, 0.5))[1]
    (tensor([0., 0., 0.]), tensor([2., 0.]))
    """
    import torch  # given
    import torch.distributed as dist  # given

    rank, n = dist.get_rank(), dist.get_world_size()  # given
    gradient, momentum = gradients[rank], momenta[rank]  # given
    filling = weights.new_zeros(n * len(momentum) - len(weights))
    parts = list(torch.cat([weights, filling]).chunk(n))
    mean = torch.empty_like(momentum)
    dist.reduce_scatter(mean, list(torch.cat([gradient, filling]).chunk(n)))
    mean /= n
    momentum = 0.9 * momentum + mean
    dist.all_gather(parts, parts[rank] - lr * momentum)
    return torch.cat(parts)[: len(weights)], momentum


# The independent route: one process that holds everything.


def _whole_step(weights, gradient, momenta, lr):
    """New weights and the whole new momentum, both without the filling."""
    momentum = 0.9 * np.concatenate(momenta)[: len(weights)] + gradient
    return weights - lr * momentum, momentum


def _slices(vector, like):
    """Cut a vector as the ranks' slices `like`, filled up with zeros."""
    filled = np.zeros(sum(map(len, like)))
    filled[: len(vector)] = vector
    return np.split(filled, len(like))


def _expect(weights, gradients, momenta, lr):
    new, momentum = _whole_step(weights, np.mean(gradients, axis=0), momenta, lr)
    return [new] * N_RANKS, _slices(momentum, momenta)


def _draw(rng):
    k = 2 * int(rng.integers(1, 4)) + 1  # which two ranks do not divide

    def quarters():
        return rng.integers(-8, 9, k) / 4

    momenta = _slices(quarters(), [np.zeros(-(-k // N_RANKS))] * N_RANKS)
    return quarters(), [quarters() for _ in range(N_RANKS)], momenta, 0.5


# Known mistakes.


def _mean(gradients):
    return np.mean(gradients, axis=0)


def _step(gradient_of_rank):
    """A way whose ranks update their slices by another gradient; the all-gather is right."""

    def way(weights, gradients, momenta, lr):
        slices = [
            _slices(gradient_of_rank(gradients, rank), momenta)[rank] for rank in range(N_RANKS)
        ]
        gradient = np.concatenate(slices)[: len(weights)]
        new, momentum = _whole_step(weights, gradient, momenta, lr)
        return [new] * N_RANKS, _slices(momentum, momenta)

    return way


def _weights(wrong):
    """A way with right momenta; wrong(old slices, new slices, rank) is a rank's new weights."""

    def way(weights, gradients, momenta, lr):
        (right, *_), new_momenta = _expect(weights, gradients, momenta, lr)
        old, new = _slices(weights, momenta), _slices(right, momenta)
        filled = [np.concatenate(wrong(old, new, rank)) for rank in range(N_RANKS)]
        return [vector[: len(weights)] for vector in filled], new_momenta

    return way


def _own_only(old, new, rank):
    return [new[k] if k == rank else old[k] for k in range(N_RANKS)]


def _added_up(old, new, rank):
    return [new[k] + (N_RANKS - 1) * old[k] for k in range(N_RANKS)]


def _whole_state(cut):
    """A way in which each rank holds the momentum of all weights, with or without the filling."""

    def way(weights, gradients, momenta, lr):
        new, slices = _expect(weights, gradients, momenta, lr)
        whole = np.concatenate(slices)
        return new, [whole[: len(weights)] if cut else whole] * N_RANKS

    return way


def _remainder(kept):
    """A way with slices of k // n elements; kept: whether the old weights behind them stay."""

    def way(weights, gradients, momenta, lr):
        size = len(weights) // N_RANKS
        whole = size * N_RANKS
        means = np.split(_mean(gradients)[:whole], N_RANKS)
        moved = [0.9 * m[:size] + mean for m, mean in zip(momenta, means, strict=True)]
        new = weights[:whole] - lr * np.concatenate(moved)
        rest = weights[whole:] if kept else []
        return [np.concatenate([new, rest])] * N_RANKS, moved

    return way


HINT_OF_AVG = (
    "May the result depend on the number of ranks? If you asked for AVG: on gloo some versions of "
    "torch sum all the same (pytorch 162338), so divide yourself."
)

EXERCISES = (
    Exercise(
        chapter=4,
        solution=sharded_optimizer_step,
        expect=_expect,
        route="one process that holds everything",
        draw=_draw,
        cases=(
            Case(
                (np.ones(2), [np.ones(2), 3 * np.ones(2)], [np.zeros(1)] * 2, 0.25),
                ([np.full(2, 0.5)] * 2, [np.full(1, 2.0)] * 2),
                "1 - 0.25 (1 + 3) / 2, by hand",
            ),
            Case(
                (np.ones(3), [np.zeros(3)] * 2, [np.array([10.0, 20]), np.array([30.0, 0])], 0.5),
                ([np.array([-3.5, -8, -12.5])] * 2, [np.array([9.0, 18]), np.array([27.0, 0])]),
                "momentum alone, one element of filling, by hand",
            ),
        ),
        misconceptions=(
            SUMMED._replace(
                ways=(_step(lambda gradients, rank: np.sum(gradients, axis=0)),), hint=HINT_OF_AVG
            ),
            Misconception(
                "divided twice",
                (_step(lambda gradients, rank: _mean(gradients) / N_RANKS),),
                "A reduce-scatter with AVG has divided by the number of ranks already.",
                "Which operation does your reduce-scatter use?",
            ),
            Misconception(
                "each rank's slice comes from its own gradient alone",
                (
                    _step(lambda gradients, rank: gradients[rank]),
                    _step(lambda gradients, rank: gradients[rank] / N_RANKS),
                ),
                "The slice has to be the mean over all ranks, whose rows differ: that is the "
                "reduce in reduce-scatter.",
                "Which part of your gradient does another rank need?",
            ),
            Misconception(
                "the other slices' new weights are missing",
                (_weights(_own_only), _weights(lambda old, new, rank: old)),
                "A rank updates its slice only. Without an all-gather after the update the ranks "
                "go on with different weights.",
                "Compare the weights on both ranks.",
            ),
            Misconception(
                "weights are added up instead of put side by side",
                (_weights(_added_up),),
                "An all-reduce of weights that were updated in one slice adds the old weights of "
                "all other ranks to it.",
                "An all-gather puts slices next to each other; an all-reduce adds.",
            ),
            Misconception(
                "every rank keeps the whole state",
                (_whole_state(cut=True), _whole_state(cut=False)),
                "The weights are right, but nothing is saved: momentum is the 12 bytes a parameter "
                "(with Adam) that stage 1 is there to cut into N.",
                "How many elements of momentum should a rank hold?",
            ),
            Misconception(
                "the remainder is dropped where N does not divide the parameters",
                (_remainder(kept=True), _remainder(kept=False)),
                "k // n elements on each rank leave the last ones to nobody: they are never "
                "trained, or lost.",
                "Fill up with zeros to a multiple of n, and cut the filling off at the end.",
            ),
        ),
        parts=("weights", "momenta"),
        tolerance=1e-9,
        why_tolerance=ORDER_OF_SUMS,
        n_random=3,
        n_ranks=N_RANKS,
    ),
)
