"""Compare a learner's answer with the right one: harmless differences of type do not count."""

import numbers
from typing import NamedTuple

import numpy as np

from parlab.exercises.records import AnyOf


class Difference(NamedTuple):
    """The first place where two answers differ.

    path: such as "[1][0]". got, expected: what stands there. what: "" where it is the value itself,
    else what about it differs.
    """

    path: str
    got: object
    expected: object
    what: str = ""


def difference(got, expected, tolerance=0.0, *, nan_is_equal=False):
    """Return the first Difference, or None for an answer that is right.

    Where a number is expected, ints, floats, NumPy scalars and arrays without dims are alike; where
    an array, so are nested lists; a list may be a tuple or an array. bool is no number, and NaN
    equals nothing, unless `nan_is_equal`.

    tolerance: relative, for expected floats only, measured against an array's largest entry.

    >>> difference(np.float64(768), 768), difference((1, [2.0]), [1, np.array([2])])
    (None, None)
    >>> difference([1, 2], [1, 3])
    Difference(path='[1]', got=2, expected=3, what='')
    """
    if isinstance(expected, AnyOf):
        found = [difference(got, v, tolerance, nan_is_equal=nan_is_equal) for v in expected.values]
        return None if None in found else found[0]
    if isinstance(expected, np.ndarray):
        return _array_difference(got, expected, tolerance, nan_is_equal)
    if isinstance(expected, dict):
        return _dict_difference(got, expected, tolerance, nan_is_equal)
    if isinstance(expected, list | tuple):
        return _list_difference(got, expected, tolerance, nan_is_equal)
    if expected is None or isinstance(expected, str | bool):
        equal = type(_plain(got)) is type(expected) and _plain(got) == expected
        return None if equal else Difference("", got, expected)
    return _number_difference(got, expected, tolerance, nan_is_equal)


def _number_difference(got, expected, tolerance, nan_is_equal):
    plain = _plain(got)
    if isinstance(plain, bool) or not isinstance(plain, numbers.Real):
        return Difference("", got, expected, "a number is expected")
    if plain == expected or (nan_is_equal and plain != plain and expected != expected):
        return None
    # With infinity or NaN on either side one of these comparisons is false.
    close = isinstance(expected, float) and (
        abs(plain - expected) <= tolerance * abs(expected) < float("inf")
    )
    return None if close else Difference("", plain, expected)


def _array_difference(got, expected, tolerance, nan_is_equal):
    try:
        array = np.asarray(got)
    except (ValueError, TypeError, RuntimeError):
        return Difference("", got, expected, "an array is expected")
    if array.dtype.kind not in "iuf":
        return Difference("", got, expected, "an array of numbers is expected")
    if array.shape != expected.shape:
        return Difference("", got, expected, f"shape {array.shape} instead of {expected.shape}")
    with np.errstate(all="ignore"):
        if array.dtype.kind == expected.dtype.kind:
            equal = array == expected
        else:  # as Python numbers: NumPy would round integers above 2^53 before it compares
            equal = (array.astype(object) == expected.astype(object)).astype(bool)
        if expected.dtype.kind == "f" and expected.size:
            scale = np.abs(np.where(np.isfinite(expected), expected, 0)).max()
            equal |= np.abs(array - expected) <= tolerance * scale
        if nan_is_equal:
            equal |= np.isnan(array) & np.isnan(expected)
    if equal.all():
        return None
    where = tuple(map(int, np.argwhere(~equal)[0]))
    path = "".join(f"[{index}]" for index in where)
    return Difference(path, array[where].item(), expected[where].item())


def _list_difference(got, expected, tolerance, nan_is_equal):
    if not isinstance(got, list | tuple | np.ndarray) or getattr(got, "ndim", 1) == 0:
        return Difference("", got, expected, f"a {type(expected).__name__} is expected")
    if len(got) != len(expected):
        return Difference("", got, expected, f"{len(got)} entries instead of {len(expected)}")
    for index, (ours, right) in enumerate(zip(got, expected, strict=True)):
        found = difference(ours, right, tolerance, nan_is_equal=nan_is_equal)
        if found:
            return found._replace(path=f"[{index}]{found.path}")
    return None


def _dict_difference(got, expected, tolerance, nan_is_equal):
    if not isinstance(got, dict) or got.keys() != expected.keys():
        return Difference("", got, expected, f"a dict with {', '.join(expected)} is expected")
    for key, right in expected.items():
        found = difference(got[key], right, tolerance, nan_is_equal=nan_is_equal)
        if found:
            return found._replace(path=f"[{key!r}]{found.path}")
    return None


def _plain(value):
    """A NumPy scalar or an array without dims as a Python value."""
    return value.item() if getattr(value, "ndim", None) == 0 else value
