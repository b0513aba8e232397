"""What a rank holds at each moment of a training step: the record, and its arithmetic."""

from typing import NamedTuple

from parlab.memory.layer import maker
from parlab.memory.rank import layers_backward
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
        return fullest(self)

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


class Options(NamedTuple):
    """What does not depend on sizes, checked."""

    stage: int
    each: tuple  # bytes a parameter of weights, gradients, optimizer
    prefetch: int
    reshard: bool
    offload: bool
    reserved: bool  # with idle buffers, which only stage 3 has
    keep_gradients: bool
    bucket_view: bool
    adam: bool  # whether its step makes temporaries of all parameters
    fp32_copy: bool  # whether it copies gradients to fp32 besides
    logit: int  # bytes a logit, 16 bits
    logit_fp32: int
    logit_gradient: int
    fragmentation: float
    context: float


def fullest(memory):
    """The bytes of the fullest moment of a TrainingMemory: the optimizer adds to the first."""
    _, loss, backward, optimizer = memory.columns
    return max(sum(loss), sum(backward), sum(optimizer))


def at_moments(rank, layer, options, mask):
    """Return the TrainingMemory of a RankShare with a LayerStep, under Options.

    mask: bytes of the embedding's dropout, which the first rank has.
    """
    number, ranks, n, in_ring, vocab, held, part, weights, gradients, optimizer, updated, _ = rank
    stage, (w, g, _), prefetch, reshard, offload, reserved, keep, view, *more = options
    adam, copy, in_16_bits, in_fp32, of_gradient, fragmentation, context = more
    sizes, of_layer, _, _ = layer
    kept, one, buckets = held * of_layer, 2 * part.layer, stage == 0 and n > 1
    before = gradients if keep or ranks > 1 or (buckets and view) else 0
    inputs = output = logits = grads = 0
    if number == ranks - 1:
        inputs = 4 * sizes.wide  # of the last norm and of the head
        size = sizes.tokens * vocab
        output, logits, grads = in_16_bits * size, in_fp32 * size, of_gradient * size

    # At one of two moments backward is fullest: in the loss's own, or in that of the layers.
    together = min(1 + prefetch, part.layers) if reshard else part.layers
    held_then, in_layers = layers_backward(rank, stage, w, g, layer, before, one * together)
    made, waiting, anew, inside, reducing, gathered, casts = held_then
    all_gathered = 0 if reshard or stage < 3 else one * part.layers
    all_casts = rank.casts + 2 * part.head if w == 4 and stage < 3 else 0
    in_loss = before + kept + all_gathered + all_casts + inputs + logits + grads
    inputs_left, logits_left = inputs, logits
    if in_loss >= in_layers:
        made, waiting, gathered, casts = before, kept, all_gathered, all_casts
        anew = inside = reducing = 0
    else:
        inputs_left = logits_left = grads = 0

    host = 0
    if offload:
        host, optimizer = optimizer, 0
        if stage >= 2:
            host, gradients, before, made = host + gradients, 0, 0, 0
        if stage == 3:
            host, weights = host + weights, 0
    if number:
        mask = 0
    under_way = 4 * sizes.keys if in_ring else 0
    ends = 2 * part.ends if stage == 3 else 0
    bucket = gradients if buckets and not view else 0
    adam = updated if adam else 0
    copy = adam if copy else 0
    # fmt: off
    columns = (
        (weights, gradients, optimizer, 0, 0, 0, 0, 0, 0, 0, 0,
         0, 0, 0, bucket, 0, 0, 0, context, 0),
        (weights, before, optimizer, kept, 0, 0, mask, inputs, output, logits, 0,
         all_gathered, ends, 0, bucket, all_casts, 0, 0, context, 2 * under_way),
        (weights, made, optimizer, waiting, anew, inside, mask, inputs_left, output, logits_left,
         grads, gathered, ends, reducing, bucket, casts, 0, 0, context, 4 * under_way),
        (weights, gradients, optimizer, 0, 0, 0, 0, 0, 0, 0, 0,
         0, 0, 0, bucket, 0, adam, copy, context, 0),
    )
    # fmt: on
    if not (fragmentation or reserved):
        return _make_memory((KINDS, columns, number, host))
    idle = ahead = 0
    if reserved:
        idle = 2 * (part.ends + part.layer * max(1, prefetch))
        ahead = max(0, gathered - one) if reshard else 0
    columns = tuple(
        (*column[:-2], fragmentation * sum(column[:-2]), free, *column[-2:])
        for column, free in zip(columns, (idle, idle, idle - ahead, idle), strict=True)
    )
    return _make_memory((ALL_KINDS, columns, number, host))
