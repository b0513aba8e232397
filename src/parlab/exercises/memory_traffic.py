"""The exercise of chapter 4 on what each stage of ZeRO sends."""

from fractions import Fraction

from parlab.exercises.memory_states import FEW_ROUNDINGS, draw_size
from parlab.exercises.records import Case, Exercise, Misconception


def zero_traffic_bytes(n_params, n_gpus, stage, micro_batches=1):
    """Return the bytes that one GPU sends in a step, weights and gradients in 2 bytes each.

    A step accumulates the gradients of several micro-batches. On a ring of N, a reduce-scatter or
    an all-gather of S bytes sends (N-1)/N S; an all-reduce is one of each.

    stage 0: one all-reduce of the gradients. 1: one reduce-scatter of the gradients, one all-gather
    of the new weights. 2: a reduce-scatter of the gradients for each micro-batch, one all-gather.
    3: for each micro-batch, all-gather of the weights in forward and again in backward, and
    reduce-scatter of the gradients.

    >>> [zero_traffic_bytes(7e9, 8, stage, 4) / 1e9 for stage in range(4)]
    [24.5, 24.5, 61.25, 147.0]
    """
    once = 2 * n_params * (n_gpus - 1) / n_gpus
    collectives = (2, 2, micro_batches + 1, 3 * micro_batches)
    return collectives[stage] * once


def _expect_traffic(n_params, n, stage, micro_batches=1):
    reduce_scatter, all_gather = "gradients", "weights"
    if stage == 0:
        collectives = [reduce_scatter, all_gather]
    elif stage < 3:
        times = micro_batches if stage == 2 else 1
        collectives = [reduce_scatter] * times + [all_gather]
    else:
        collectives = [all_gather, all_gather, reduce_scatter] * micro_batches
    return float(sum(Fraction(2 * n_params) * Fraction(n - 1, n) for _ in collectives))


def _draw_traffic(rng):
    return *draw_size(rng), int(rng.integers(1, 9))


# Known mistakes.


def _collectives(count):
    return lambda n_params, n, stage, m=1: 2 * n_params * (n - 1) / n * count(stage, m)


def _right_count(stage, m):
    return (2, 2, m + 1, 3 * m)[stage]


ZERO_TRAFFIC = Exercise(
    chapter=4,
    solution=zero_traffic_bytes,
    expect=_expect_traffic,
    route="collectives listed one by one, exact fractions",
    draw=_draw_traffic,
    cases=tuple(
        Case((7e9, 8, stage, 4), gb * 1e9, "DeepSpeed 2252")
        for stage, gb in enumerate((24.5, 24.5, 61.25, 147.0))
    ),
    misconceptions=(
        Misconception(
            "gradient accumulation is forgotten",
            (_collectives(lambda stage, m: _right_count(stage, 1)),),
            "From stage 2 on a GPU has no room for the whole gradient, so each micro-batch is "
            "reduced at once; stage 3 gathers the weights for each as well.",
            "Which stages can wait until the last micro-batch?",
        ),
        Misconception(
            "every stage communicates for every micro-batch",
            (_collectives(lambda stage, m: (2, 2, 2, 3)[stage] * m),),
            "At stages 0 and 1 the gradients are added up locally and reduced once (DDP's "
            "no_sync); the weights change once a step.",
            "What does a GPU hold at stage 1 between micro-batches?",
        ),
        Misconception(
            "stage 3 gathers the weights only once",
            (_collectives(lambda stage, m: (2, 2, m + 1, 2 * m)[stage]),),
            "After forward the gathered weights are dropped, so backward has to gather them again: "
            "1.5 times data parallelism.",
            "What has become of a layer's weights when backward comes back to it?",
        ),
        Misconception(
            "stage 1 saves half of the traffic",
            (_collectives(lambda stage, m: (2, 1, m, 3 * m)[stage]),),
            "A reduce-scatter is half of an all-reduce, but then the new weights must be gathered.",
            "Who holds the new weights after the optimizer's step?",
        ),
        Misconception(
            "(N-1)/N is left out",
            (lambda n_params, n, stage, m=1: 2 * n_params * _right_count(stage, m),),
            "A rank need not send what it keeps: of N chunks it sends N - 1.",
            "What is the traffic for one GPU?",
        ),
        Misconception(
            "sent and received bytes are counted together",
            (lambda *args: 2 * _expect_traffic(*args),),
            "Every byte that one GPU sends another receives.",
            "Count at the sender only.",
        ),
    ),
    tolerance=1e-9,
    why_tolerance=FEW_ROUNDINGS,
)

EXERCISES = (ZERO_TRAFFIC,)
