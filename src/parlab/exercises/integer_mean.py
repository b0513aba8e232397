"""The exercise of chapter 1 on the mean of integers, which collectives get wrong without a word."""

from fractions import Fraction

import numpy as np

from parlab.exercises.records import Case, Exercise, Misconception


def mean_over_ranks(arrays):
    """Return the exact elementwise mean of the ranks' integers, as float64.

    arrays: one per rank, all of one shape, of dtype int8 (-128 to 127).

    >>> mean_over_ranks([np.array([3, 100], np.int8), np.array([4, 120], np.int8)]).tolist()
    [3.5, 110.0]
    """
    return sum(array.astype(float) for array in arrays) / len(arrays)


def _expect(arrays):
    """Fractions of Python's integers, which have no end."""
    columns = zip(*(array.tolist() for array in arrays), strict=True)
    return np.array([float(Fraction(sum(column), len(arrays))) for column in columns])


def _draw(rng):
    n, size = int(rng.integers(2, 6)), int(rng.integers(1, 6))
    return ([rng.integers(-128, 128, size).astype(np.int8) for _ in range(n)],)


# Known mistakes.


def _total(arrays):
    return np.sum(np.stack(arrays), axis=0, dtype=np.int64)


def _wrapped(arrays):
    return np.sum(np.stack(arrays), axis=0, dtype=np.int8)


EXERCISES = (
    Exercise(
        chapter=1,
        solution=mean_over_ranks,
        expect=_expect,
        route="fractions of Python's integers",
        draw=_draw,
        cases=(
            Case(
                ([np.array([3], np.int8), np.array([4], np.int8)],),
                np.array([3.5]),
                "torchcomms PR 287",
            ),
            Case(
                ([np.array([120], np.int8), np.array([100], np.int8)],),
                np.array([110.0]),
                "220 is no int8: by hand",
            ),
        ),
        misconceptions=(
            Misconception(
                "the sum wraps around in int8",
                (
                    lambda arrays: _wrapped(arrays) / len(arrays),
                    lambda arrays: _wrapped(arrays) // len(arrays),
                ),
                "120 + 100 in int8 is -36, and nothing fails: gradients or counts that are sent in "
                "a narrow integer type come back with another sign.",
                "Which dtype has the sum of two int8 arrays?",
            ),
            Misconception(
                "the mean is cut to an integer",
                (
                    lambda arrays: _total(arrays) // len(arrays),
                    lambda arrays: np.trunc(_total(arrays) / len(arrays)),
                    lambda arrays: np.round(_total(arrays) / len(arrays)),
                ),
                "The mean of 3 and 4 is 3.5. An all-reduce with AVG on integers gives 3, or "
                "refuses, depending on the backend.",
                "Which dtype has your result?",
            ),
            Misconception(
                "divided before adding, in integers",
                (lambda arrays: sum(array // len(arrays) for array in arrays),),
                "Each rank's part is rounded down, up to 1 a rank is lost.",
                "What is 3 // 2 + 4 // 2?",
            ),
            Misconception(
                "the sum instead of the mean",
                (_total,),
                "An all-reduce adds up; nobody has divided by the number of ranks.",
                "May the mean be larger than the largest entry?",
            ),
        ),
        tolerance=1e-12,
        why_tolerance="each rank's part may be divided before it is added",
    ),
)
