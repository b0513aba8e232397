"""What a rank holds in a training step: first what no batch changes, then the rest.

w and g are bytes per parameter of weights and gradients, c those with which backward makes one.
"""

from typing import NamedTuple

from parlab.memory.activations import layers_in_flight
from parlab.memory.layer import maker, vocab_share
from parlab.memory.moments import ALL_KINDS, KINDS, TrainingMemory
from parlab.memory.rank import rank_params, rank_states
from parlab.memory.states import share


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
    temporaries: int  # bytes that the optimizer's step makes for each parameter: 4, 2 or 0
    fp32_copy: bool  # whether it copies gradients to fp32 besides
    logit: int  # bytes a logit, 16 bits
    logit_fp32: int
    logit_gradient: int
    fragmentation: float
    context: float


class RankShare(NamedTuple):
    """What a rank holds, whatever the batch; bytes where nothing else is said.

    A gradient is made with c bytes and reduced with g. Backward of the layers starts with those of
    the head and of the MLP's last matrix (`first`), and ends with all, and with the gradient of the
    embedding's output (`end`). Where the last layer's takes more to reduce than its activations
    gave back, backward is fuller one layer later (`second`). Of each place, and of the loss's own
    backward, what no batch changes: gradients, those in flight, gathered layers, casts, and their
    sum, less the idle buffers that a gather uses.
    """

    number: int  # 0 is the first of the pipeline's ranks
    held: int  # layers' worth of activations at most
    keys: int  # 4 for each of a layer's keys if ring attention sends them, else 0
    inputs: int  # 4 for each of its input's elements on the last rank: of last norm and head
    logits: tuple  # of one token: in 16 bits, in fp32, as gradients
    weights: float
    optimizer: float
    ends: float  # embedding and head that stage 3 has gathered
    bucket: float
    context: float
    host: float
    lasting: float  # the five that are on the card through forward and backward
    loss: tuple
    first: tuple
    second: tuple
    end: tuple
    reduced: float  # of a layer's gradients in flight; 0 where there is no second
    after_step: tuple  # bytes of each of KINDS
    in_optimizer: tuple
    optimizer_total: float
    gaps: tuple | None  # fragmentation, idle buffers, bytes gathered beyond which they are in use


_make_memory, _make_share = maker(TrainingMemory), maker(RankShare)
NOTHING = (0,) * 11  # of KINDS, between the optimizer and the buckets


def rank_share(config, degrees, options, number):
    """Return the RankShare of a rank of the pipeline.

    degrees: those of tensor and pipeline parallelism, chunks, GPUs over which ZeRO shards, whether
    a ring cuts the sequence, and the ranks over which experts spread. options: Options.
    """
    tp, pipeline, chunks, n, in_ring, ep = degrees
    stage, each, prefetch, reshard, offload, reserved, keep, view, *more = options
    temporaries, copy, in_16_bits, in_fp32, of_gradient, fragmentation, context = more
    held = layers_in_flight(config.layers, pipeline, chunks, number)
    part = rank_params(config, tp, pipeline, number, ep)
    weights, gradients, optimizer, updated = rank_states(part, each, n, ep, stage)
    host = 0
    if offload:
        host, optimizer = optimizer, 0
        if stage >= 2:
            host, gradients = host + gradients, 0
        if stage == 3:
            host, weights = host + weights, 0
    before = bucket = ends = of_input = a_token = idle = 0
    if keep or pipeline > 1:
        before = gradients
    if stage == 0 and n > 1:
        before, bucket = (gradients, 0) if view else (before, gradients)
    if stage == 3:
        ends = 2 * part.ends
    if number == pipeline - 1:
        of_input, a_token = 4, vocab_share(config.vocab, tp)
    adam = share(updated, 4 // temporaries) if temporaries else 0
    copy = updated if copy else 0
    after_step = (weights, gradients, optimizer, *NOTHING, bucket, 0, 0, 0, context, 0)
    in_optimizer = (weights, gradients, optimizer, *NOTHING, bucket, 0, adam, copy, context, 0)
    if reserved:
        idle = 2 * (part.ends + part.layer * max(1, prefetch))
    lasting = weights + optimizer + bucket + context
    in_use = 2 * part.layer * (1 if reserved and reshard else part.layers)
    return _make_share(
        (
            number,
            held,
            4 if in_ring else 0,
            of_input,
            (in_16_bits * a_token, in_fp32 * a_token, of_gradient * a_token),
            weights,
            optimizer,
            ends,
            bucket,
            context,
            host,
            lasting + ends,
            *_places(part, options, n, before, gradients, held, in_use),
            after_step,
            in_optimizer,
            lasting + gradients + adam + copy,
            (fragmentation, idle, in_use) if fragmentation or reserved else None,
        )
    )


def _places(part, options, n, before, gradients, held, in_use):
    """Return the four places of a RankShare, and the bytes of a layer's gradients in flight."""
    layers, layer, matrices, last_matrix, head, ends, _, _ = part
    stage, (w, g, _), prefetch, reshard, offload, *_ = options
    casts = all_casts = gathered = all_gathered = one = 0
    if stage == 3:
        one = 2 * layer
        gathered = one * (min(1 + prefetch, layers) if reshard else layers)
        all_gathered = 0 if reshard else gathered
    elif w == 4:
        casts = 2 * matrices * layers
        all_casts = casts + 2 * head
    loss = (before, 0, all_gathered, all_casts, before + all_gathered + all_casts)
    if stage < 2:
        first = before or g * (head + last_matrix)
        first = (first, 0, 0, casts, first + casts)
        return loss, first, first, (gradients, 0, 0, 0, gradients), 0
    # FSDP2 reduces the head's gradients with the last layer's; stage 2 has reduced them before.
    c, reducing, made = 2, 2 * (head + last_matrix), 0
    if stage == 2:
        c, reducing, made = w, w * last_matrix, share(g * head, n)
    reduced = g * layer if held > 1 else 0
    more = share(reduced, n)
    if offload:
        made = more = 0
    counted = min(gathered, in_use) + casts
    made, more = before or made, before or made + more
    first = (made, reducing, gathered, casts, made + reducing + counted)
    reducing += reduced
    second = (more, reducing, gathered, casts, more + reducing + counted)
    in_flight = (c + g) * max(layer, ends)
    return loss, first, second, (gradients, in_flight, one, 0, gradients + in_flight + one), reduced


def at_moments(rank, layer, mask, floor=-1):
    """Return (bytes at the fullest moment, TrainingMemory) of a RankShare with a LayerStep.

    mask: bytes of the embedding's dropout, which the first rank has. floor: of a rank that never
    holds more than so many bytes nothing else is said, and None is returned.
    """
    number, layers, key, of_input, of_token, weights, optimizer, ends, bucket, context = rank[:10]
    host, lasting, loss, place, second, end, reduced, after_step, in_optimizer = rank[10:19]
    optimizer_total, gaps = rank[19:]
    sizes, of_layer, anew, inside = layer
    tokens, wide = sizes.tokens, sizes.wide
    kept, inputs, under_way = layers * of_layer, of_input * wide, key * sizes.keys
    logit, fp32, gradient = of_token
    output, logits, grads = logit * tokens, fp32 * tokens, gradient * tokens
    if number:
        mask = 0

    waiting = kept
    if of_layer < reduced:
        place, waiting = second, kept - of_layer
    in_loss = loss[4] + kept + inputs + logits + grads
    in_layer = place[4] + waiting + anew + inside
    at_end = end[4] + 2 * wide
    inputs_left = logits_left = 0
    most = in_layer
    if in_loss >= in_layer and in_loss >= at_end:
        place, waiting, anew, inside, most = loss, kept, 0, 0, in_loss
        inputs_left, logits_left = inputs, logits
    else:
        grads = 0
        if in_layer < at_end:
            place, waiting, anew, inside, most = end, 0, 0, 2 * wide, at_end
    most += lasting + mask + output + 4 * under_way
    if most < optimizer_total:
        most = optimizer_total
    if most <= floor and not gaps:
        return None
    before, _, all_gathered, all_casts, _ = loss
    made, reducing, gathered, casts, _ = place
    # fmt: off
    columns = (
        after_step,
        (weights, before, optimizer, kept, 0, 0, mask, inputs, output, logits, 0,
         all_gathered, ends, 0, bucket, all_casts, 0, 0, context, 2 * under_way),
        (weights, made, optimizer, waiting, anew, inside, mask, inputs_left, output, logits_left,
         grads, gathered, ends, reducing, bucket, casts, 0, 0, context, 4 * under_way),
        in_optimizer,
    )
    # fmt: on
    if not gaps:
        return most, _make_memory((KINDS, columns, number, host))
    fragmentation, idle, needed = gaps
    free = idle - max(0, gathered - needed)
    columns = tuple(
        (*column[:-2], fragmentation * sum(column[:-2]), there, *column[-2:])
        for column, there in zip(columns, (idle, idle, free, idle), strict=True)
    )
    memory = _make_memory((ALL_KINDS, columns, number, host))
    return (memory.peak, memory) if memory.peak > floor else None
