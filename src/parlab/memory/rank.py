"""One rank: the parameters of its pipeline stage, and their states.

t is the ranks of tensor parallelism, p pipeline stages, ep the ranks over which experts spread; w,
g and k are bytes per parameter of weights, gradients and optimizer.
"""

from functools import lru_cache
from typing import NamedTuple

from parlab.memory.layer import vocab_share
from parlab.memory.states import share, zero_shares


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
