"""Run schedules on NumPy rows, one for the tensor of each rank.

A schedule is compiled once for a tensor size. Short chunks lie in one block, and the sends of a
step at even distances in it (those of a ring step lie on a diagonal) become one strided move, so
that a thousand ranks cost a few NumPy calls per step instead of a thousand.
"""

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from parlab.collectives.cost import traffic

# Elements. Joining spares calls, but NumPy first copies the source of a joined addition, since the
# strided views might overlap; for long chunks that costs more than the calls.
LONGEST_JOINED = 2**13


class Move(NamedTuple):
    """`count` sends as one strided copy or addition; positions and lengths in elements."""

    read: int
    read_stride: int
    write: int
    write_stride: int
    count: int
    length: int
    reduce: bool


class Plan(NamedTuple):
    """A schedule compiled for one size: (moves, needs a snapshot) per step, and elements sent."""

    steps: list
    sent: list

    @property
    def joins_ranks(self):
        return any(move.count > 1 for moves, _ in self.steps for move in moves)

    def sent_bytes(self, rows):
        return [elements * rows[0].itemsize for elements in self.sent]


@lru_cache(maxsize=16)
def plan_for(make_schedule, arguments, elements):
    return compile_plan(make_schedule(*arguments), elements)


def compile_plan(schedule, elements):
    """Compile a schedule; `elements` is cut evenly into chunks, or gives the size of each."""
    if isinstance(elements, int):
        whole, rest = divmod(elements, schedule.n_chunks)
        elements = [whole + (chunk < rest) for chunk in range(schedule.n_chunks)]
    starts = np.concatenate(([0], np.cumsum(elements))).tolist()
    row = starts[-1]
    steps = []
    for step in schedule.steps:
        written = {(dst, chunk) for _, dst, chunk, _ in step}
        snapshot = any((src, chunk) in written for src, _, chunk, _ in step)
        places = [
            (src * row + starts[chunk], dst * row + starts[chunk], elements[chunk], reduce)
            for src, dst, chunk, reduce in step
            if elements[chunk]
        ]
        # Additions to one place must happen one by one: NumPy would keep only the last of them.
        steps.append((_moves(places, joinable=len(written) == len(step)), snapshot))
    return Plan(steps, traffic(schedule, elements).sent)


def _moves(places, joinable):
    """Join neighbouring (read, write, length, reduce) that lie at even distances."""
    moves = []
    i = 0
    while i < len(places):
        read, write, length, reduce = places[i]
        count, read_stride, write_stride = 1, 0, 0
        if joinable and length <= LONGEST_JOINED and i + 1 < len(places):
            read_stride, write_stride = places[i + 1][0] - read, places[i + 1][1] - write
            while i + count < len(places) and places[i + count] == (
                read + count * read_stride,
                write + count * write_stride,
                length,
                reduce,
            ):
                count += 1
        moves.append(Move(read, read_stride, write, write_stride, count, length, reduce))
        i += count
    return moves


def new_rows(plan, n_ranks, elements, dtype):
    """Uninitialised rows: cut from one block where moves join ranks, and otherwise apart.

    A block of many large rows would be new memory from the system in every call, which costs more
    than the additions; rows apart are taken from memory that was freed before.
    """
    if plan.joins_ranks:
        return list(np.empty((n_ranks, elements), dtype))
    return [np.empty(elements, dtype) for _ in range(n_ranks)]


def stack(plan, arrays):
    """Return new rows that hold the arrays, flat."""
    rows = new_rows(plan, len(arrays), arrays[0].size, arrays[0].dtype)
    for row, array in zip(rows, arrays, strict=True):
        row.reshape(array.shape)[...] = array
    return rows


def execute(plan, rows):
    """Carry out all steps of the plan on `rows` in place, and return them."""
    size = rows[0].itemsize

    def view(start, stride, move):
        if move.count == 1:
            rank, offset = divmod(start, rows[0].size)
            return rows[rank][offset : offset + move.length]
        shape, strides = (move.count, move.length), (stride * size, size)
        return np.ndarray(shape, rows[0].dtype, rows[0].base, start * size, strides)

    for moves, snapshot in plan.steps:
        sources = [view(move.read, move.read_stride, move) for move in moves]
        if snapshot:
            sources = [source.copy() for source in sources]
        for move, source in zip(moves, sources, strict=True):
            target = view(move.write, move.write_stride, move)
            if move.reduce:
                np.add(target, source, out=target)
            else:
                target[...] = source
    return rows
