"""Linear layers and the Megatron MLP with their matrices cut over n simulated ranks.

Activations are x (..., in), weights (in, out) and used as x @ W, so "column" means output feature
and "row" input feature. Inputs are never changed; integers count as float64 and float16 as float32,
because partial sums that leave their range would wrap around or meet as infinity minus infinity.
"""

import numpy as np

from parlab.units import require_choice, require_int

ROOT_2_OVER_PI = (2 / np.pi) ** 0.5


def gelu(x):
    """GeLU in its tanh form: x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))).

    Hendrycks and Gimpel (2016), section 2. x: any shape.

    >>> print(f"{gelu(1) + gelu(1):.2f} {gelu(2):.2f}")  # it does not distribute over a sum
    1.68 1.95
    """
    x = as_floats("x", x)
    return x / 2 * (1 + np.tanh(_gelu_argument(x)))


def gelu_gradient(x):
    """The derivative of `gelu` at x, element by element.

    >>> float(gelu_gradient(0)), float(gelu_gradient(100))
    (0.5, 1.0)
    """
    x = as_floats("x", x)
    tanh = np.tanh(_gelu_argument(x))
    near = np.clip(x, -10, 10)  # further out tanh is 1 to the last bit, so the second term is 0
    slope = ROOT_2_OVER_PI * (1 + 3 * 0.044715 * near**2)
    return (1 + tanh) / 2 + near / 2 * (1 - tanh**2) * slope


def column_shards(w, n, *, stored="in_out"):
    """Cut a weight into n equal blocks of output features, one per rank.

    stored: "in_out" for a weight used as x @ W, where a block is a set of columns; "out_in" for one
    used as W @ x, as torch.nn.Linear stores it, where the same block is a set of rows.

    >>> [shard.tolist() for shard in column_shards(np.array([[1, 2], [3, 4]]), 2)]
    [[[1], [3]], [[2], [4]]]

    Raises ValueError where n does not divide the output features.
    """
    stored = require_choice("stored", stored, ("in_out", "out_in"))
    return equal_parts("output features", w, n, axis=1 if stored == "in_out" else 0)


def row_shards(w, n, *, stored="in_out"):
    """Cut a weight into n equal blocks of input features; arguments as in `column_shards`.

    >>> [shard.tolist() for shard in row_shards(np.array([[1, 2], [3, 4]]), 2)]
    [[[1, 2]], [[3, 4]]]
    """
    stored = require_choice("stored", stored, ("in_out", "out_in"))
    return equal_parts("input features", w, n, axis=0 if stored == "in_out" else 1)


@np.errstate(over="ignore", invalid="ignore")  # `require_finite` refuses what they would warn of
def column_parallel(x, w_shards, *, biases=None, gather=True):
    """Return x @ [W_1 | W_2 | ...], each block computed by the rank that holds it.

    x: (..., in), whole on every rank. w_shards: rank i's W_i, (in, out_i). biases: rank i's slice
    of the bias, (out_i,). gather: concatenate the blocks, which costs an all-gather; False leaves
    them where they are, as a list, and then the forward pass communicates nothing.

    >>> w = np.array([[1.0, 2.0, 3.0, 4.0]])
    >>> column_parallel([[10.0]], column_shards(w, 2)).tolist()
    [[10.0, 20.0, 30.0, 40.0]]

    Raises ValueError for shapes that do not fit, TypeError for values that are not numbers.
    """
    x = as_floats("x", x)
    shards = _weights("w_shards", w_shards)
    biases = _biases(biases, shards)
    outputs = []
    for rank, (w, bias) in enumerate(zip(shards, biases, strict=True)):
        _require_fit("x", x, f"w_shards[{rank}]", w)
        outputs.append(require_finite(x @ w + bias, x, w, bias))
    return np.concatenate(outputs, axis=-1) if gather else outputs


@np.errstate(over="ignore", invalid="ignore")
def row_parallel(x_shards, w_shards, bias=None):
    """Return [x_1 | x_2 | ...] @ [W_1 ; W_2 ; ...] as the sum of every rank's x_i @ W_i.

    On real ranks the sum is an all-reduce. The bias is added once, to the sum: added on every rank
    it would count n times.

    x_shards: rank i's (..., in_i). w_shards: rank i's (in_i, out). bias: (out,).

    >>> x, w = np.array([1, 2, 3, 4]), np.arange(12).reshape(4, 3)
    >>> row_parallel([x[:2], x[2:]], row_shards(w, 2), bias=[100, 200, 300]).tolist()
    [160.0, 270.0, 380.0]

    Raises ValueError for shapes that do not fit, TypeError for values that are not numbers.
    """
    xs = [as_floats(f"x_shards[{rank}]", x) for rank, x in enumerate(x_shards)]
    shards = _weights("w_shards", w_shards)
    if len(xs) != len(shards):
        raise ValueError(
            f"x_shards and w_shards must hold one array per rank, got {len(xs)} and {len(shards)}"
        )
    for rank, (x, w) in enumerate(zip(xs, shards, strict=True)):
        _require_fit(f"x_shards[{rank}]", x, f"w_shards[{rank}]", w)
        if x.shape[:-1] != xs[0].shape[:-1] or w.shape[1] != shards[0].shape[1]:
            raise ValueError(
                f"every rank must hold a partial sum of one shape, got x_shards[{rank}] "
                f"{x.shape} and w_shards[{rank}] {w.shape} beside {xs[0].shape} and "
                f"{shards[0].shape} on rank 0"
            )
    (bias,) = _biases(None if bias is None else [bias], shards[:1], "bias")
    total = sum(x @ w for x, w in zip(xs, shards, strict=True)) + bias
    return require_finite(total, *xs, *shards, bias)


def megatron_mlp(x, A, B, n, *, bias_a=None, bias_b=None, activation=gelu):
    """Return activation(x A + a) B + b with A cut by columns and B by rows over n ranks.

    One all-reduce, at the end: the activation works element by element, so each rank's block of
    x A is all that its rows of B need (Shoeybi et al. 2019, section 3, equation 3).

    x: (..., h), whole on every rank. A: (h, f). B: (f, h). bias_a: (f,), of which each rank adds
    its slice. bias_b: (h,), added once. n: ranks; must divide f.

    >>> x, A, B = np.ones((1, 2)), np.ones((2, 4)), np.ones((4, 2))
    >>> bool(np.allclose(megatron_mlp(x, A, B, 4), gelu(x @ A) @ B))
    True
    """
    a_shards, b_shards = column_shards(A, n), row_shards(B, n)
    biases = None if bias_a is None else equal_parts("bias_a", bias_a, n, axis=0)
    hidden = column_parallel(x, a_shards, biases=biases, gather=False)
    return row_parallel([activation(block) for block in hidden], b_shards, bias_b)


def as_floats(name, values):
    """Return values as a float array of at least 32 bits, or say why they can't be one."""
    array = np.asarray(values)
    if array.dtype.kind not in "iuf":
        raise TypeError(f"{name} must hold real numbers, got dtype {array.dtype}")
    if array.dtype.kind in "iu":
        if array.size and max(abs(int(array.min())), abs(int(array.max()))) > 2**53:
            raise ValueError(f"{name} must hold integers up to 2^53: float64 rounds larger ones")
        return array.astype(np.float64)
    return array.astype(np.float32) if array.dtype.itemsize < 4 else array


def equal_parts(what, array, n, *, axis):
    """Return n equal blocks of an array along an axis, or name what n fails to divide."""
    array, n = np.asarray(array), require_int("n", n, minimum=1)
    if array.ndim <= axis:
        raise ValueError(f"a cut by {what} needs dim {axis}, got shape {array.shape}")
    if array.shape[axis] % n:
        raise ValueError(
            f"n must divide the {array.shape[axis]} {what}, got {n}: "
            "every rank holds a block of the same size"
        )
    return np.split(array, n, axis=axis)


def require_finite(result, *inputs):
    """Return the result of a computation, but refuse a NaN or infinity out of finite inputs."""
    if not np.isfinite(result).all() and all(np.isfinite(array).all() for array in inputs):
        raise ValueError(f"the result leaves the range of {result.dtype}: scale the inputs down")
    return result


def _gelu_argument(x):
    # Beyond 10 tanh is 1 to the last bit; clipping keeps the cube in range.
    near = np.clip(x, -10, 10)
    return ROOT_2_OVER_PI * (near + 0.044715 * near**3)


def _weights(name, shards):
    shards = [as_floats(f"{name}[{rank}]", shard) for rank, shard in enumerate(shards)]
    if not shards:
        raise ValueError(f"{name} must hold one array per rank, got none")
    for rank, shard in enumerate(shards):
        if shard.ndim != 2:
            raise ValueError(f"{name}[{rank}] must be (in, out), got shape {shard.shape}")
    return shards


def _biases(biases, shards, name="biases"):
    if biases is None:
        return [np.float32(0)] * len(shards)  # float32, to leave the dtype of a product as it is
    biases = [as_floats(name, bias) for bias in biases]
    wanted, got = [shard.shape[1:] for shard in shards], [bias.shape for bias in biases]
    if got != wanted:
        raise ValueError(f"{name} must fit the output features {wanted}, got {got}")
    return biases


def _require_fit(x_name, x, w_name, w):
    if x.ndim < 1 or x.shape[-1] != w.shape[0]:
        raise ValueError(
            f"the last dim of {x_name} must be the first of {w_name}, "
            f"got shapes {x.shape} and {w.shape}"
        )
