"""A timeline as text in blocks of time, each as wide as a terminal."""

from fractions import Fraction
from functools import reduce
from math import gcd

from parlab.pipeline.grid import text_grid

WIDTH = 88
MOST_LINES = 200


def wrapped_grid(timeline, transfer):
    """Return (seconds of a column, lines); (None, None) beyond 200 lines or without a common unit.

    timeline: of stages that all take the same time. transfer: seconds between ranks.
    """
    kinds = {action.kind for action in timeline.schedule.actions[0]}
    times = {timeline.times[kind][0] for kind in kinds} | {transfer}
    slot = float(reduce(_common_unit, times - {0}))
    try:
        lines = text_grid(timeline, slot).splitlines()
    except ValueError:
        return None, None
    label = len(f"rank {timeline.schedule.p - 1}") + 2
    cell = max(len(word) for line in lines for word in line[label:].split()) + 2
    block = (WIDTH - label) // cell * cell
    wrapped = []
    for start in range(label, max(map(len, lines)), block):
        wrapped += [""] if wrapped else []
        wrapped += [(line[:label] + line[start : start + block]).rstrip() for line in lines]
    return (slot, wrapped) if len(wrapped) <= MOST_LINES else (None, None)


def _common_unit(one, other):
    """The longest time of which both are multiples, as they are written in decimal."""
    one, other = Fraction(str(one)), Fraction(str(other))
    numerator = gcd(one.numerator * other.denominator, other.numerator * one.denominator)
    return Fraction(numerator, one.denominator * other.denominator)
