"""What a rank holds at each moment of a training step, item by item."""

from typing import NamedTuple

from parlab.memory.layer import maker
from parlab.units import require_choice

MOMENTS = ("after the step", "loss", "backward", "optimizer")


class StepItem(NamedTuple):
    """Something that a rank holds, and its bytes at each of `MOMENTS`."""

    name: str
    group: str  # "states", "activations" or "on top"
    bytes: tuple


class TrainingMemory(NamedTuple):
    """Items on the card, which sum to the total of each moment."""

    kinds: tuple  # (name, group) of every kind of item
    columns: tuple  # for each of `MOMENTS` the bytes of each kind
    pipeline_rank: int
    host_bytes: float  # what offloading moved to the host

    @classmethod
    def of_rows(cls, rows, pipeline_rank=0, host_bytes=0):
        """Make one of (name, group, bytes) of each item."""
        columns = tuple(zip(*[held for *_, held in rows], strict=True))
        return cls(tuple(row[:2] for row in rows), columns, pipeline_rank, host_bytes)

    @property
    def rows(self):
        """(name, group, bytes) of the states, the layers, and whatever else takes any."""
        held = zip(self.kinds, zip(*self.columns, strict=True), strict=True)
        return tuple([(*kind, row) for kind, row in held if any(row) or kind in ALWAYS])

    @property
    def items(self):
        """The rows as StepItems, made when asked for: a search reads totals only."""
        return tuple(map(_make_item, self.rows))

    @property
    def totals(self):
        """Bytes at each of `MOMENTS`."""
        return tuple(map(sum, self.columns))

    def at(self, moment):
        """Bytes at one of `MOMENTS`."""
        return self.totals[MOMENTS.index(require_choice("moment", moment, MOMENTS))]

    @property
    def after_step(self):
        """Bytes between two steps, before gradients are freed."""
        return sum(self.columns[0])

    @property
    def peak(self):
        """Bytes at the fullest moment."""
        return max(self.totals)

    @property
    def peak_moment(self):
        """The fullest of `MOMENTS`."""
        totals = self.totals
        return MOMENTS[totals.index(max(totals))]


_make_memory, _make_item = maker(TrainingMemory), maker(StepItem)
ALWAYS = (
    ("weights", "states"),
    ("gradients", "states"),
    ("optimizer", "states"),
    ("layers", "activations"),
)
KINDS = (
    *ALWAYS,
    ("recomputed layer", "activations"),
    ("gradients inside a layer", "activations"),
    ("dropout mask of the embedding", "activations"),
    ("inputs of last norm and head", "activations"),
    ("logits, 16 bits", "activations"),
    ("logits, fp32", "activations"),
    ("gradients of the logits", "activations"),
    ("gathered layers", "on top"),
    ("gathered embedding and head", "on top"),
    ("gradients being reduced", "on top"),
    ("DDP buckets", "on top"),
    ("casts of autocast", "on top"),
    ("temporaries of foreach", "on top"),
    ("fp32 copy of the gradients", "on top"),
    ("CUDA context", "on top"),
    ("keys and values under way", "on top"),
)
ALL_KINDS = (
    *KINDS[:-2],
    ("fragmentation", "on top"),
    ("idle buffers of gathers", "on top"),
    *KINDS[-2:],
)
