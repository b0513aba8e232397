"""One rank: the parameters of its pipeline stage, their states, and the backward of its layers.

t is the ranks of tensor parallelism, p pipeline stages, ep the ranks over which experts spread; w,
g and k are bytes per parameter of weights, gradients and optimizer.
"""

from functools import lru_cache
from typing import NamedTuple

from parlab.memory.activations import layers_in_flight
from parlab.memory.layer import vocab_share
from parlab.memory.states import (
    BYTE_RECIPES,
    MOST_GPUS,
    require_expert_parallel,
    share,
    zero_shares,
)
from parlab.units import require_int


class RankParams(NamedTuple):
    """Parameters on one rank."""

    layers: int  # how many layers
    layer: int  # parameters of one, with the experts that are here
    matrices: int  # of these, the ones that a product reads
    last_matrix: int  # of the MLP, or of all experts that are here
    head: int  # weight of the head, 0 on a rank without it
    ends: int  # embedding, positions, last norm and head, as far as they are here
    shared: int  # all but experts
    experts: int


@lru_cache(maxsize=1024)  # a search asks for the same ones over and over
def rank_params(config, tp, pipeline, rank, expert_parallel):
    """Count what a rank has of a ModelConfig: layers / p, cut by t, and the ends on their stages.

    t cuts matrices, and the vocabulary of embedding and head; norms, positions, router and biases
    that are added to a sum over ranks are whole on each. A tied head is a second copy if p > 1.
    """
    ep = expert_parallel
    cut, whole, expert_cut, expert_whole = config.layer_parts
    expert_cut //= tp * ep
    experts = expert_cut + expert_whole // ep
    layer, layers, h = cut // tp + whole, config.layers // pipeline, config.hidden
    table = vocab_share(config.vocab, tp) * h
    has_head = rank == pipeline - 1
    ends = table + (config.positions or 0) * h if rank == 0 else 0
    if has_head:
        ends += 2 * h if config.norm == "layer" else h
        if pipeline > 1 or not config.tied:
            ends += table
    last_matrix = h * (config.ffn // tp) * (config.experts // ep)
    return RankParams(
        layers=layers,
        layer=layer + experts,
        matrices=cut // tp + expert_cut,
        last_matrix=last_matrix,
        head=table if has_head else 0,
        ends=ends,
        shared=layers * layer + ends,
        experts=layers * experts,
    )


def rank_states(part, each, n_gpus, expert_parallel, stage):
    """Return bytes of weights, gradients, optimizer, and of 4 for each parameter it updates."""
    weights, gradients, optimizer = zero_shares(part.shared, *each, n_gpus, stage)
    updated = share(4 * part.shared, n_gpus if stage else 1)
    if part.experts:
        group = n_gpus // expert_parallel
        more = zero_shares(part.experts, *each, group, stage)
        weights, gradients, optimizer = weights + more[0], gradients + more[1], optimizer + more[2]
        updated += share(4 * part.experts, group if stage else 1)
    return weights, gradients, optimizer, updated


class RankShare(NamedTuple):
    """What a rank has of a model, whatever the batch: its place, parameters and bytes of states."""

    number: int  # 0 is the first of the pipeline's ranks
    ranks: int
    n_gpus: int
    in_ring: bool  # whether ring attention sends keys and values
    vocab: int  # columns of logits here
    held: int  # layers' worth of activations at most
    part: RankParams
    weights: float
    gradients: float
    optimizer: float
    updated: float  # 4 bytes for each parameter that its optimizer updates
    casts: int  # 2 bytes for each parameter of its layers' matrices


@lru_cache(maxsize=4096, typed=True)  # a sweep over batches asks for the same one over and over
def rank_shares(
    config,
    tp,
    pipeline,
    chunks,
    n_gpus,
    context_parallel,
    expert_parallel,
    recipe,
    stage,
    pipeline_rank,
):
    """Check the degrees but tp; return the RankShare of a rank, or both ends of the pipeline."""
    pipeline = require_int("pipeline", pipeline, minimum=1)
    n = require_int("n_gpus", n_gpus, minimum=1, maximum=MOST_GPUS)
    in_ring = require_int("context_parallel", context_parallel, minimum=1) > 1
    ep = require_expert_parallel(expert_parallel, config, n)
    tp = int(tp)  # not NumPy's, whose products wrap around
    vocab, found = vocab_share(config.vocab, tp), []
    ends = sorted({0, pipeline - 1}) if pipeline_rank is None else [pipeline_rank]
    for number in ends:
        held = layers_in_flight(config.layers, pipeline, chunks, number)
        part = rank_params(config, tp, pipeline, int(number), ep)
        states = rank_states(part, BYTE_RECIPES[recipe].of_each, n, ep, int(stage))
        casts = 2 * part.matrices * part.layers
        place = (int(number), pipeline, n, in_ring, vocab, held)
        found.append(RankShare(*place, part, *states, casts))
    return found


def layers_backward(rank, stage, w, g, layer, before, gathered):
    """Return bytes at the fuller end of the layers' backward, and their sum.

    Of gradients, activations, those again, gradients inside a layer, in flight, gathered, casts. It
    starts with the gradients of the head and of the MLP's last matrix; it ends with all, and with
    the gradient of the embedding's output. A gradient is made with c bytes and reduced with g.
    Where the last layer's takes more to reduce than its activations gave back, backward is fullest
    one layer later.

    rank: a RankShare. layer: a LayerStep. before: gradients that were there. gathered: bytes of the
    layers that stage 3 holds whole.
    """
    _, _, n, _, _, held, part, _, gradients, _, _, casts = rank
    sizes, of_layer, again, inside = layer
    kept, width = held * of_layer, 2 * sizes.wide
    if w != 4 or stage == 3:
        casts = 0
    if stage < 2:
        first = before or g * (part.head + part.last_matrix)
        start, end = first + kept + again + inside + casts, gradients + width
        if start >= end:
            return (first, kept, again, inside, 0, 0, casts), start
        return (gradients, 0, 0, width, 0, 0, 0), end
    reducing = made = 0
    if of_layer < g * part.layer and held > 1:
        kept, reducing, made = kept - of_layer, g * part.layer, share(g * part.layer, n)
    if stage == 2:
        c, one, gathered = w, 0, 0
        reducing += c * part.last_matrix
        made += share(g * part.head, n)
    else:
        c, one = 2, 2 * part.layer
        reducing += c * (part.head + part.last_matrix)
    first = before or made
    in_flight = (c + g) * max(part.layer, part.ends)
    start = first + kept + again + inside + reducing + gathered + casts
    end = gradients + width + in_flight + one
    if start >= end:
        return (first, kept, again, inside, reducing, gathered, casts), start
    return (gradients, 0, 0, width, in_flight, one, 0), end
