"""Write values in one short line, for a report."""

import numpy as np

LONGEST = 72
MOST_ENTRIES = 8


def show(value, longest=LONGEST):
    """Write a value as Python would, but short: large arrays as their shape, floats to 10 digits.

    >>> show([np.array([1.0, 2.5]), 3]), show(np.zeros((12, 8)))
    ('[array([1.0, 2.5]), 3]', 'array of shape (12, 8)')
    """
    text = " ".join(_text(value).split())
    return text if len(text) <= longest else text[: longest - 3] + "..."


def show_call(name, args):
    """Write a call with its arguments.

    >>> show_call("pipeline_bubble", (4, 29))
    'pipeline_bubble(4, 29)'
    """
    return f"{name}({', '.join(show(arg) for arg in args)})"


def size_of(value):
    """How large an input is to a reader: its numbers, and then how big they are.

    >>> size_of((np.zeros(3), 1)) < size_of((np.zeros(4), 1)) < size_of((np.zeros(4), 2))
    True
    """
    if isinstance(value, list | tuple):
        sizes = [size_of(entry) for entry in value]
        return sum(count for count, _ in sizes), sum(big for _, big in sizes)
    if isinstance(value, str):
        return 1, 0.0
    array = np.asarray(value, dtype=float)
    magnitudes = np.log1p(np.abs(array[np.isfinite(array)]))
    return array.size, float(magnitudes.sum())


def _text(value):
    if isinstance(value, np.ndarray):
        if value.size > MOST_ENTRIES:
            return f"array of shape {value.shape}"
        return f"array({_text(value.tolist())})"
    if isinstance(value, np.generic):
        return _text(value.item())
    if isinstance(value, float):
        return repr(float(f"{value:.10g}"))
    if isinstance(value, list):
        return f"[{_entries(value)}]"
    if isinstance(value, tuple):
        return f"({_entries(value)}{',' if len(value) == 1 else ''})"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_text(k)}: {_text(v)}" for k, v in value.items()) + "}"
    return repr(value)


def _entries(values):
    shown = [_text(value) for value in values[:MOST_ENTRIES]]
    return ", ".join(shown + ["..."] * (len(values) > MOST_ENTRIES))
