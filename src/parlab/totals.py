"""Totals of a record's items, written once."""


def total(field, meaning, *, of="items"):
    """Return a property that sums a field over a record's items, described by `meaning`.

    >>> from typing import NamedTuple
    >>> class Line(NamedTuple):
    ...     bytes: int
    >>> class Bill(NamedTuple):
    ...     items: tuple
    ...     bytes = total("bytes", "Bytes of all items.")
    >>> Bill((Line(1), Line(2))).bytes
    3
    """
    return property(lambda record: sum(getattr(i, field) for i in getattr(record, of)), doc=meaning)
