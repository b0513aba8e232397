"""Exercises of chapter 4: bytes of weights, gradients and optimizer under ZeRO."""

from fractions import Fraction

from parlab.exercises.records import Case, Exercise, Misconception

FEW_ROUNDINGS = "a handful of multiplications and divisions of floats"


def zero_memory_bytes(n_params, n_gpus, stage, k=12):
    """Return the bytes of the model states on one GPU.

    2 bytes a parameter of weights, 2 of gradients and k of optimizer. Stage 1 cuts the optimizer
    over the GPUs, stage 2 the gradients too, stage 3 the weights too.

    >>> [zero_memory_bytes(7e9, 8, stage) / 1e9 for stage in range(4)]
    [112.0, 38.5, 26.25, 14.0]
    """
    weights, gradients, optimizer = 2 * n_params, 2 * n_params, k * n_params
    if stage >= 1:
        optimizer /= n_gpus
    if stage >= 2:
        gradients /= n_gpus
    if stage >= 3:
        weights /= n_gpus
    return weights + gradients + optimizer


def zero_memory(n_params, n_gpus, stage, weight_bytes=2, grad_bytes=2, k=12):
    """Return (weights, gradients, optimizer): bytes of each on one GPU.

    weight_bytes, grad_bytes, k: bytes a parameter of each. Stages as in `zero_memory_bytes`.

    >>> zero_memory(7e9, 8, 2, grad_bytes=4)
    (14000000000.0, 3500000000.0, 10500000000.0)
    """
    weights = weight_bytes * n_params / (n_gpus if stage >= 3 else 1)
    gradients = grad_bytes * n_params / (n_gpus if stage >= 2 else 1)
    optimizer = k * n_params / (n_gpus if stage >= 1 else 1)
    return weights, gradients, optimizer


# Independent routes: exact fractions, item by item.


def _expect_memory(n_params, n, stage, weight_bytes=2, grad_bytes=2, k=12):
    cut_from = {"weights": 3, "gradients": 2, "optimizer": 1}
    sizes = {"weights": weight_bytes, "gradients": grad_bytes, "optimizer": k}
    return tuple(
        float(Fraction(n_params) * sizes[item] / (n if stage >= cut_from[item] else 1))
        for item in cut_from
    )


def _expect_memory_bytes(n_params, n, stage, k=12):
    return float(sum(map(Fraction, _expect_memory(n_params, n, stage, k=k))))


def draw_size(rng):
    return int(rng.integers(1, 500)) * 10**8, int(rng.integers(2, 65)), int(rng.integers(0, 4))


def _draw_memory_bytes(rng):
    return *draw_size(rng), int(rng.choice([4, 8, 12, 16]))


def _draw_memory(rng):
    return *draw_size(rng), *(int(b) for b in rng.choice([1, 2, 4, 6, 8, 12], 3, replace=False))


# Known mistakes.


def _cut(order):
    """Totals where the stages cut the items in another order; w, g and o stand for them."""

    def compute(n_params, n, stage, k=12):
        sizes = {"w": 2, "g": 2, "o": k}
        return sum(sizes[item] * n_params / (n if item in order[:stage] else 1) for item in sizes)

    return compute


def _all_divided(n_params, n, stage, k=12):
    return (4 + k) * n_params / (n if stage else 1)


def _autocast(n_params, n, stage, k=12):
    return sum(_expect_memory(n_params, n, stage, 4, 4, k - 4))


def _scaled(expect, factor):
    return lambda *args: expect(*args) * factor


def _items(change):
    """Ways of `zero_memory` from what each stage cuts: change(stage) gives the items."""

    def compute(n_params, n, stage, weight_bytes=2, grad_bytes=2, k=12):
        sizes = {"w": weight_bytes, "g": grad_bytes, "o": k}
        return tuple(sizes[i] * n_params / (n if i in change(stage) else 1) for i in sizes)

    return compute


_PAPER = "ZeRO paper, figure 1: 7.5B on 64"

ZERO_MEMORY_BYTES = Exercise(
    chapter=4,
    solution=zero_memory_bytes,
    expect=_expect_memory_bytes,
    route="exact fractions, item by item",
    draw=_draw_memory_bytes,
    cases=(
        *(
            Case((7.5e9, 64, stage), gb * 1e9, _PAPER)
            for stage, gb in enumerate((120.0, 31.40625, 16.640625, 1.875))
        ),
        *(
            Case((7e9, 8, stage), gb * 1e9, "7B on 8, stages 0 to 3")
            for stage, gb in enumerate((112.0, 38.5, 26.25, 14.0))
        ),
        Case((2.851e9, 8, 2), 1.069125e10, "DeepSpeed 4076"),
        Case((6.805e9, 4, 3), 2.722e10, "DeepSpeed 4527"),
        Case((10**9, 2, 0, 8), 12e9, "SGD with momentum: k = 8"),
    ),
    misconceptions=(
        Misconception(
            "the wrong item is cut first",
            (_cut("gow"), _cut("wog"), _cut("gwo"), _cut("wgo")),
            "ZeRO cuts the largest item first: the optimizer with its 12 bytes, at stage 1.",
            "Which of 2, 2 and k is divided by N at stage 1?",
        ),
        Misconception(
            "all items are cut from stage 1 on",
            (_all_divided,),
            "That is stage 3. Stage 1 leaves weights and gradients whole, stage 2 the weights.",
            "Write down the three items for each stage.",
        ),
        Misconception(
            "the stages are off by one",
            (
                lambda n_params, n, stage, k=12: _expect_memory_bytes(n_params, n, stage - 1, k),
                lambda n_params, n, stage, k=12: _expect_memory_bytes(n_params, n, stage + 1, k),
            ),
            "Stage 0 is plain data parallelism; stage 1 is the first that cuts something.",
            "What is the memory at stage 0?",
        ),
        Misconception(
            "4 + 4 + 8 bytes",
            (_autocast,),
            "Autocast keeps weights and gradients in fp32, and no second copy. The total is 16 as "
            "well, but at stages 1 and 2 other bytes are cut. Here it is 2 + 2 + 12.",
            "How many bytes does the docstring give the weights?",
        ),
        Misconception(
            "the fp32 copy of the weights is forgotten",
            (
                lambda n_params, n, stage, k=12: _expect_memory_bytes(n_params, n, stage, k - 4),
                lambda n_params, n, stage, k=12: _expect_memory_bytes(n_params, n, stage, 8),
            ),
            "Mixed-precision Adam has 12 bytes of optimizer: momentum, variance, and fp32 weights.",
            "Use k as it is given.",
        ),
        Misconception(
            "k is not used",
            (lambda n_params, n, stage, k=12: _expect_memory_bytes(n_params, n, stage, 12),),
            "Other optimizers have other k: 8 for SGD with momentum.",
            "Where does your function use its last parameter?",
        ),
        Misconception(
            "GiB for bytes or GB",
            (
                _scaled(_expect_memory_bytes, 2**-30),
                _scaled(_expect_memory_bytes, 1e9 / 2**30),
            ),
            "1 GB is 10^9 bytes, 1 GiB 2^30: 7% more. The result is asked for in bytes.",
            "Leave the units to whoever prints the number.",
        ),
        Misconception(
            "GB instead of bytes",
            (_scaled(_expect_memory_bytes, 1e-9),),
            "The name ends in _bytes.",
            "Leave the units to whoever prints the number.",
        ),
    ),
    tolerance=1e-9,
    why_tolerance=FEW_ROUNDINGS,
)

ZERO_MEMORY = Exercise(
    chapter=4,
    solution=zero_memory,
    expect=_expect_memory,
    route="exact fractions, item by item",
    draw=_draw_memory,
    cases=tuple(
        Case((7e9, 8, stage, 2, 4, 12), tuple(gb * 1e9 for gb in items), "Megatron-LM PR 1345")
        for stage, items in enumerate(
            ((14.0, 28.0, 84.0), (14.0, 28.0, 10.5), (14.0, 3.5, 10.5), (1.75, 3.5, 10.5))
        )
    ),
    misconceptions=(
        Misconception(
            "stage 2 cuts the weights, not the gradients",
            (_items(lambda stage: ("", "o", "ow", "owg")[stage]),),
            "With 2 bytes each the total is the same, so nobody notices, until gradients are kept "
            "in fp32. Weights are needed whole in every forward; gradients only where the "
            "optimizer is.",
            "Which of the two does a GPU need for all layers before backward has begun?",
        ),
        Misconception(
            "stage 2 cuts everything",
            (_items(lambda stage: ("", "o", "owg", "owg")[stage]),),
            "That is stage 3, which gathers the weights again when they are needed.",
            "What distinguishes stages 2 and 3?",
        ),
        Misconception(
            "stage 1 cuts the gradients too",
            (_items(lambda stage: ("", "og", "og", "owg")[stage]),),
            "At stage 1 every GPU still accumulates the whole gradient.",
            "What distinguishes stages 1 and 2?",
        ),
        Misconception(
            "the bytes of weights and gradients are exchanged",
            (lambda psi, n, stage, w=2, g=2, k=12: _expect_memory(psi, n, stage, g, w, k),),
            "They are often equal, but gradients kept in fp32 have 4 bytes.",
            "Follow each parameter to its item.",
        ),
        Misconception(
            "gradients always have 2 bytes",
            (lambda psi, n, stage, w=2, g=2, k=12: _expect_memory(psi, n, stage, w, 2, k),),
            "Many runs accumulate in fp32: 7B on 8 GPUs is then 126, not 112 GB at stage 0.",
            "Where does your function use grad_bytes?",
        ),
    ),
    parts=("weights", "gradients", "optimizer"),
    tolerance=1e-9,
    why_tolerance=FEW_ROUNDINGS,
)

EXERCISES = (ZERO_MEMORY_BYTES, ZERO_MEMORY)
