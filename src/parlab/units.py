"""Units in, units out: constants, printed figures, and the checks that public functions share.

Numbers are plain SI (bytes, seconds, bytes/s). 1 GB = 10^9 bytes; GiB = 2^30 only where a tool
reports it. A check returns the value in a form that is safe to compute with.
"""

import operator
import sys

KB, MB, GB = 10**3, 10**6, 10**9
KIB, MIB, GIB = 2**10, 2**20, 2**30

_BYTE_UNITS = ((1, "B"), (1e3, "kB"), (1e6, "MB"), (1e9, "GB"), (1e12, "TB"), (1e15, "PB"))
_SECOND_UNITS = ((1e-9, "ns"), (1e-6, "µs"), (1e-3, "ms"), (1, "s"))


def format_bytes(n_bytes):
    """Write a number of bytes with three significant digits and a decimal unit.

    >>> format_bytes(14e9), format_bytes(1536), format_bytes(999_600)
    ('14 GB', '1.54 kB', '1 MB')
    """
    return _format("n_bytes", n_bytes, _BYTE_UNITS, "B")


def format_seconds(seconds):
    """Write a time with three significant digits, in s, ms, µs or ns.

    >>> format_seconds(0.0544), format_seconds(5e-6), format_seconds(0.9996)
    ('54.4 ms', '5 µs', '1 s')
    """
    return _format("seconds", seconds, _SECOND_UNITS, "s")


def format_rate(bytes_per_s):
    """Write a bandwidth with three significant digits.

    >>> format_rate(450e9)
    '450 GB/s'
    """
    return _format("bytes_per_s", bytes_per_s, _BYTE_UNITS, "B") + "/s"


def require_int(name, value, *, minimum=None, maximum=None, why=""):
    """Return ``value`` as an int, or say what ``name`` allows.

    NumPy integers are accepted; bool, float and text are not, since each hides a mistake.

    Raises TypeError for anything that is not a whole number, ValueError outside the bounds.

    >>> require_int("n_ranks", 0, minimum=1, why="someone has to hold the data")
    Traceback (most recent call last):
    ...
    ValueError: n_ranks must be an int of at least 1, got 0: someone has to hold the data
    """
    # The usual case first: an estimate has dozens of these checks, and microseconds.
    if (
        type(value) is int
        and (minimum is None or value >= minimum)
        and (maximum is None or value <= maximum)
    ):
        return value
    rule = f"an int{_bounds(minimum, maximum)}"
    plain = _unwrap(value)
    if isinstance(plain, bool):
        raise TypeError(_message(name, rule, value, why))
    try:
        plain = operator.index(plain)
    except TypeError:
        raise TypeError(_message(name, rule, value, why)) from None
    if (minimum is not None and plain < minimum) or (maximum is not None and plain > maximum):
        raise ValueError(_message(name, rule, value, why))
    return plain


def require_number(name, value, *, minimum=None, exclusive=False, why=""):
    """Return ``value`` as int, float or an array of floats, or say what ``name`` allows.

    A NumPy array is checked element by element. Integer arrays and NumPy scalars are converted,
    because their products wrap around silently where Python's do not.

    ``minimum`` is allowed itself unless ``exclusive``.

    Raises TypeError for anything that is not a real number, ValueError for NaN, infinity, a value
    below the minimum, or an int beyond the range of a float.

    >>> require_number("latency_s", float("nan"), minimum=0)
    Traceback (most recent call last):
    ...
    ValueError: latency_s must be a finite number of at least 0, got nan
    """
    if (
        (type(value) is float or type(value) is int)
        and minimum is not None
        and not exclusive
        and minimum <= value <= sys.float_info.max
    ):
        return value
    rule = f"a finite number{_bounds(minimum, None, exclusive)}"
    plain = _unwrap(value)
    is_array = getattr(getattr(plain, "dtype", None), "kind", None) in ("i", "u", "f")
    if is_array:
        plain = plain.astype(float)
    elif isinstance(plain, bool) or not isinstance(plain, (int, float)):
        raise TypeError(_message(name, rule, value, why))
    # One comparison refuses NaN, infinity and an int that no float can hold.
    good = abs(plain) <= sys.float_info.max
    if minimum is not None:
        good = good & (plain > minimum if exclusive else plain >= minimum)
    if not (good.all() if is_array else good):
        raise ValueError(_message(name, rule, value, why))
    return plain


def require_bool(name, value):
    """Return ``value``, which must be True or False; 1 and 0.1 hide a mistake."""
    if value is True or value is False:
        return value
    raise TypeError(_message(name, "True or False", value))


def require_choice(name, value, choices):
    """Return the entry of ``choices`` that equals ``value`` but for case, or offer the nearest.

    >>> require_choice("name", "Nvlink-44", ["nvlink-4", "pcie-4"])
    Traceback (most recent call last):
    ...
    ValueError: name must be one of nvlink-4, pcie-4, got 'Nvlink-44'; did you mean nvlink-4?
    """
    if type(value) is str and hasattr(choices, "__len__") and value in choices:
        return value
    choices = list(choices)
    if not isinstance(value, str):
        raise TypeError(_message(name, f"text, one of {', '.join(choices)}", value))
    by_lower = {choice.lower(): choice for choice in choices}
    wanted = value.strip().lower()
    if wanted in by_lower:
        return by_lower[wanted]
    from difflib import get_close_matches  # only the error needs it

    near = [by_lower[match] for match in get_close_matches(wanted, by_lower, cutoff=0.5)]
    hint = f"; did you mean {' or '.join(near)}?" if near else ""
    raise ValueError(_message(name, f"one of {', '.join(choices)}", value) + hint)


def _format(name, value, units, base):
    number = float(require_number(name, value))
    # Round before choosing the unit, so that 999.6 kB becomes 1 MB and not 1000 kB.
    rounded = float(f"{number:.3g}")
    if rounded == 0:
        return f"0 {base}"
    fitting = (pair for pair in reversed(units) if pair[0] <= abs(rounded))
    factor, unit = next(fitting, units[0])
    return f"{float(f'{rounded / factor:.3g}'):.15g} {unit}"


def _unwrap(value):
    """Turn NumPy scalars and arrays without dimensions into Python numbers, without NumPy."""
    return value.item() if getattr(value, "ndim", None) == 0 else value


def _bounds(minimum, maximum, exclusive=False):
    if minimum is None and maximum is None:
        return ""
    if minimum is None:
        return f" of at most {maximum}"
    if maximum is None:
        return f" above {minimum}" if exclusive else f" of at least {minimum}"
    return f" from {minimum} to {maximum}"


def _message(name, rule, value, why=""):
    if isinstance(value, int) and value.bit_length() > 200:
        got = f"an int of {value.bit_length()} bits"
    else:
        got = " ".join(repr(value).split())
        got = got if len(got) <= 60 else got[:57] + "..."
        if not isinstance(value, (int, float, str)):
            got += f" ({type(value).__name__})"
    return f"{name} must be {rule}, got {got}" + (f": {why}" if why else "")
