"""The exercise of chapter 3 on real processes: Megatron's f and g as autograd functions."""

import math

import numpy as np

from parlab.exercises.records import Case, Exercise, Misconception
from parlab.exercises.tensor_linear import ORDER_OF_SUMS

N_RANKS = 2


def mlp_with_f_and_g(x, A, B, dz):
    """Forward and backward of GeLU(x A) B, cut over several processes; every rank calls this.

    A rank has some columns of A and the matching rows of B. Write f and g as subclasses of
    torch.autograd.Function, each with static methods forward(ctx, tensor) and backward(ctx,
    gradient). f stands where x enters the block, whole on every rank; g where the ranks' partial
    results leave it as one. What each has to do on the way back follows from that.

    x: (rows, h). A: (h, f). B: (f, h). dz: (rows, h), gradient of the loss with respect to the
    result. All are the same on every rank, which take their shares themselves.

    Returns (z, dx, dA, dB): result, and gradients as without ranks: of x whole, of A and B the
    rank's share.

    >>> import torch
    >>> from parlab import run_ranks
    >>> args = torch.zeros(1, 2), torch.ones(2, 4), torch.ones(4, 2), torch.ones(1, 2)
    >>> z, dx, dA, dB = run_ranks(mlp_with_f_and_g, 2, args=args)[0]
    >>> z, dx  # GeLU's slope at 0 is 1/2: 4 columns, each with 1/2 of 1 + 1
    (tensor([[0., 0.]]), tensor([[4., 4.]]))
    >>> dA.shape, dB.shape
    (torch.Size([2, 2]), torch.Size([2, 2]))
    """
    import torch  # given
    import torch.distributed as dist  # given

    def summed(tensor):
        total = tensor.clone()
        dist.all_reduce(total)
        return total

    class f(torch.autograd.Function):
        @staticmethod
        def forward(ctx, tensor):
            return tensor

        @staticmethod
        def backward(ctx, gradient):
            return summed(gradient)

    class g(torch.autograd.Function):
        @staticmethod
        def forward(ctx, tensor):
            return summed(tensor)

        @staticmethod
        def backward(ctx, gradient):
            return gradient

    rank, n = dist.get_rank(), dist.get_world_size()  # given
    shares = x, A.tensor_split(n, dim=1)[rank], B.tensor_split(n)[rank]  # given
    x, A, B = (share.clone().requires_grad_() for share in shares)  # given
    z = g.apply(torch.nn.functional.gelu(f.apply(x) @ A) @ B)  # given
    z.backward(dz)  # given
    return z.detach(), x.grad, A.grad, B.grad  # given


# The independent route: no ranks, GeLU and its derivative entry by entry.


def _gelu(x):
    return x * _normal_cdf(x)


def _gelu_slope(x):
    return _normal_cdf(x) + x * np.exp(-(x**2) / 2) / math.sqrt(2 * math.pi)


def _normal_cdf(x):
    return np.vectorize(lambda v: (1 + math.erf(v / math.sqrt(2))) / 2)(x)


def _mlp(x, A, B, dz):
    """z, and the gradients of x, A and B."""
    hidden = x @ A
    back = (dz @ B.T) * _gelu_slope(hidden)
    return _gelu(hidden) @ B, back @ A.T, x.T @ back, _gelu(hidden).T @ dz


def _expect(x, A, B, dz):
    z, dx, dA, dB = _mlp(x, A, B, dz)
    return [z] * N_RANKS, [dx] * N_RANKS, np.split(dA, N_RANKS, axis=1), np.split(dB, N_RANKS)


def _draw(rng):
    rows, h, f = (int(rng.integers(1, 4)) for _ in range(3))
    shapes = (rows, h), (h, N_RANKS * f), (N_RANKS * f, h), (rows, h)
    return tuple(rng.integers(-8, 9, shape) / 4 for shape in shapes)


def _case(rows, h, f, source):
    rng = np.random.default_rng(f)
    x, A, B, dz = (rng.normal(size=s) for s in ((rows, h), (h, f), (f, h), (rows, h)))
    return Case((x, A, B, dz), _expect(x, A, B, dz), source)


# Known mistakes: what f and g do with the values of all ranks, forward and backward.


def _pass_on(values):
    return values


def _sum(values):
    return [sum(values)] * len(values)


def _mean(values):
    return [sum(values) / len(values)] * len(values)


def _operators(f, g):
    """A way with (forward, backward) of f and of g."""

    def way(x, A, B, dz):
        x_of = f[0]([x] * N_RANKS)
        dz_of = g[1]([dz] * N_RANKS)
        shards = zip(np.split(A, N_RANKS, axis=1), np.split(B, N_RANKS), strict=True)
        pairs = zip(x_of, shards, dz_of, strict=True)
        z, dx, dA, dB = zip(*(_mlp(x, *shard, dz) for x, shard, dz in pairs), strict=True)
        return g[0](z), f[1](dx), list(dA), list(dB)

    return way


F, G = (_pass_on, _sum), (_sum, _pass_on)

EXERCISES = (
    Exercise(
        chapter=3,
        solution=mlp_with_f_and_g,
        expect=_expect,
        route="without ranks, gradients in closed form",
        draw=_draw,
        cases=(_case(2, 3, 4, "small"), _case(3, 4, 16, "A 4 x 16")),
        misconceptions=(
            Misconception(
                "f has no all-reduce in backward",
                (_operators((_pass_on, _pass_on), G),),
                "Each rank sends x through its own columns of A, and so knows only their part of "
                "the gradient. The layer below needs the sum.",
                "x is used on N ranks; what is the gradient of something that is used N times?",
            ),
            Misconception(
                "g's backward all-reduces too",
                (_operators(F, (_sum, _sum)),),
                "The gradient of the result is whole on every rank already. Summing N equal copies "
                "makes all gradients N times too large.",
                "How large is the gradient of a + b with respect to a?",
            ),
            Misconception(
                "f and g are exchanged in backward",
                (_operators((_pass_on, _pass_on), (_sum, _sum)),),
                "Backward runs the other way: where forward passes on, backward sums, and where "
                "forward sums, backward passes on.",
                "Which of the two gradients is only a part of something?",
            ),
            Misconception(
                "f and g are exchanged",
                (_operators(G, F),),
                "x is whole on every rank before the block, so a sum there makes N x of it; the "
                "results after the block are partial and stay so.",
                "At which end of the block do the ranks hold partial results?",
            ),
            Misconception(
                "g does not sum in forward",
                (_operators(F, (_pass_on, _pass_on)),),
                "A rank's rows of B give one term of the result. The layers above would compute "
                "with N different ones.",
                "Compare z on both ranks.",
            ),
            Misconception(
                "partial results are averaged",
                (_operators(F, (_mean, _pass_on)),),
                "They are terms of one sum, not N estimates of the same.",
                "Compare an all-reduce with SUM and one with AVG.",
            ),
            Misconception(
                "the gradient of x is averaged",
                (_operators((_pass_on, _mean), G),),
                "Averages belong to data parallelism, where each rank has other rows. Here each "
                "has other columns, and x's gradient is their sum.",
                "Compare an all-reduce with SUM and one with AVG.",
            ),
        ),
        parts=("z", "dx", "dA", "dB"),
        tolerance=1e-9,
        why_tolerance=ORDER_OF_SUMS,
        n_random=3,
        n_ranks=N_RANKS,
    ),
)
