"""The exercise of chapter 2 on real processes: what DistributedDataParallel does, by hand."""

import numpy as np

from parlab.exercises.data_parallel import DROPPED, ORDER_OF_SUMS, SUMMED, TWICE
from parlab.exercises.records import Case, Exercise, Misconception

N_RANKS = 2


def ddp_by_hand(X, y, starts, lr, steps):
    """Train a linear model on several processes that stay equal; every rank calls this.

    The prediction is X w + b, the loss the mean of its squared errors, the optimizer plain gradient
    descent: parameter -= lr * gradient. All ranks begin with the parameters of rank 0, as under
    DDP, and each computes gradients of its own rows only.

    X: (rows, features). y: (rows,). The ranks divide the rows. starts: one pair (w, b) per rank, w
    of shape (features,), b of shape (1,). lr: learning rate.

    Returns (w, b) after the steps, which are those of one process with all rows.

    >>> import torch
    >>> from parlab import run_ranks
    >>> X, y, start = torch.tensor([[1.0], [3.0]]), torch.zeros(2), (torch.ones(1), torch.zeros(1))
    >>> run_ranks(ddp_by_hand, 2, args=(X, y, [start, start], 0.1, 1))  # 1 - 0.1 (2 + 18) / 2
    [(tensor([0.]), tensor([-0.4000])), (tensor([0.]), tensor([-0.4000]))]
    """
    import torch.distributed as dist  # given

    rank, n = dist.get_rank(), dist.get_world_size()  # given
    w, b = (start.clone().requires_grad_() for start in starts[rank])  # given
    X, y = X.tensor_split(n)[rank], y.tensor_split(n)[rank]  # given
    for parameter in (w, b):
        dist.broadcast(parameter.detach(), src=0)
    for _ in range(steps):
        loss = ((X @ w + b - y) ** 2).mean()
        loss.backward()
        for parameter in (w, b):
            dist.all_reduce(parameter.grad)
            parameter.data -= lr * parameter.grad / n
            parameter.grad = None
    return w.detach(), b.detach()  # given


# The independent route.


def _expect(X, y, starts, lr, steps):
    """One process with all rows; the gradients in closed form."""
    w, b = starts[0]
    for _ in range(steps):
        misses = X @ w + b - y
        w, b = w - lr * 2 * X.T @ misses / len(X), b - lr * 2 * misses.mean()
    return [w] * N_RANKS, [b] * N_RANKS


def _draw(rng):
    rows, features = N_RANKS * int(rng.integers(1, 4)), int(rng.integers(1, 4))

    def quarters(*shape):
        return rng.integers(-8, 9, shape) / 4

    starts = [(quarters(features), quarters(1)) for _ in range(N_RANKS)]
    return quarters(rows, features), quarters(rows), starts, 0.125, int(rng.integers(2, 4))


# Known mistakes, in arrays with one row a rank; the bias is the weight of a feature that is 1.


def _train(combine, begin=lambda starts: starts[0], left_in_grad=lambda n: 0):
    """A way to train wrongly.

    combine: the ranks' gradients to what each rank steps by. begin: the ranks' starts to those
    that they begin with. left_in_grad: times how much that step is still in .grad when the next
    backward pass adds to it.
    """

    def way(X, y, starts, lr, steps):
        n = len(starts)
        shards = list(zip(np.split(np.c_[X, np.ones(len(X))], n), np.split(y, n), strict=True))
        starts = np.stack([np.concatenate(start) for start in starts])
        weights, taken = _on_all(starts, begin(starts)), 0
        for _ in range(steps):
            own = [
                2 * X.T @ (X @ w - y) / len(X) for (X, y), w in zip(shards, weights, strict=True)
            ]
            taken = _on_all(starts, combine(np.stack(own) + left_in_grad(n) * taken))
            weights = weights - lr * taken
        return [w[:-1] for w in weights], [w[-1:] for w in weights]

    return way


def _on_all(like, values):
    return np.broadcast_to(values, like.shape)


def _without(wrong, right, bias):
    """The bias's column, or all others, from `wrong` instead of `right`."""
    is_bias = np.arange(wrong.shape[1]) == wrong.shape[1] - 1
    return np.where(is_bias == bias, wrong, right)


EXERCISES = (
    Exercise(
        chapter=2,
        solution=ddp_by_hand,
        expect=_expect,
        route="one process with all rows, gradients in closed form",
        draw=_draw,
        cases=(
            Case(
                (
                    np.array([[1.0], [3.0]]),
                    np.zeros(2),
                    [(np.ones(1), np.zeros(1)), (np.zeros(1), np.ones(1))],
                    0.25,
                    1,
                ),
                ([np.array([-1.5])] * 2, [np.array([-1.0])] * 2),
                "gradients 2 and 18, 2 and 6, by hand",
            ),
        ),
        misconceptions=(
            SUMMED._replace(ways=(_train(lambda g: g.sum(0)),)),
            Misconception(
                "divided twice",
                (_train(lambda g: g.mean(0) / len(g)),),
                "ReduceOp.AVG, or a loss over all rows of the batch, has divided by the number of "
                "ranks already; a second time makes the step N times too small.",
                "After the all-reduce of equal gradients, what should .grad be?",
            ),
            Misconception(
                "every rank steps by its own gradient",
                (_train(lambda g: g),),
                "Without an all-reduce before the step each rank trains a model of its own on its "
                "share of the data. Afterwards it is too late.",
                "Print w on both ranks after one step.",
            ),
            Misconception(
                "the parameters are not broadcast at the start",
                (_train(lambda g: g.mean(0), begin=lambda starts: starts),),
                "Equal steps keep equal models equal, and different ones different: each rank "
                "would add the same gradients to another start.",
                "What does DDP do before the first forward pass?",
            ),
            Misconception(
                "the ranks begin with something else than rank 0's parameters",
                (
                    _train(lambda g: g.mean(0), begin=lambda starts: starts[-1]),
                    _train(lambda g: g.mean(0), begin=lambda starts: starts.mean(0)),
                ),
                "DDP makes all models equal to that of rank 0. The last rank's, or the mean, would "
                "be equal as well, but is not what a checkpoint on rank 0 holds.",
                "Which rank is the source of the broadcast?",
            ),
            Misconception(
                "one parameter is left out of the all-reduce",
                (
                    _train(lambda g: _without(g, g.mean(0), bias=True)),
                    _train(lambda g: _without(g, g.mean(0), bias=False)),
                ),
                "The parameter that is left out drifts apart on the ranks, though all others stay "
                "equal, and nothing fails.",
                "DDP reduces the gradient of every parameter, the biases too.",
            ),
            Misconception(
                "gradients of earlier steps are still in .grad",
                (
                    _train(lambda g: g.mean(0), left_in_grad=lambda n: 1),
                    _train(lambda g: g.mean(0), left_in_grad=lambda n: n),
                ),
                "backward adds to .grad. What is not cleared is averaged and used again in every "
                "later step.",
                "Compare one step with two.",
            ),
            Misconception(
                DROPPED,
                (
                    _train(lambda g: g[0] / len(g)),
                    _train(lambda g: g[-1] / len(g)),
                    _train(lambda g: g[0]),
                    _train(lambda g: g[-1]),
                ),
                "The rows of one rank have no say: the ranks stay equal, so nothing looks wrong, "
                "but half of the data is read for nothing.",
                "A broadcast of gradients is no all-reduce.",
            ),
            Misconception(
                TWICE,
                (
                    _train(lambda g: (g.sum(0) + g) / len(g)),
                    _train(lambda g: (g.sum(0) + g) / (len(g) + 1)),
                ),
                "The sum over all ranks holds a rank's own gradient already. Adding it again makes "
                "every rank weigh its own rows double, and the models drift apart.",
                "What stands in the tensor after dist.all_reduce?",
            ),
        ),
        parts=("w", "b"),
        tolerance=1e-9,
        why_tolerance=ORDER_OF_SUMS,
        n_random=3,
        n_ranks=N_RANKS,
    ),
)
