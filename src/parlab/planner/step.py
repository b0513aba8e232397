"""Seconds of one iteration, item by item: the same arithmetic for an estimate and a search."""

from dataclasses import dataclass
from functools import lru_cache
from operator import add
from typing import NamedTuple

from parlab.memory.layer import maker
from parlab.planner.layer import layer_time, matmul_seconds
from parlab.planner.network import (
    all_to_all_seconds,
    gather_seconds,
    hop_route,
    neighbour_route,
    route,
)

LOGIT_BYTES = 22  # passes over the logits: 16 bits written, then read and written in fp32
LOSS_KERNELS = 6


class StepTime(NamedTuple):
    """Seconds of an iteration on its slowest pipeline rank; they sum to the whole."""

    matmul: float
    attention: float
    elementwise: float
    launches: float
    recompute: float
    head_and_loss: float
    tensor_parallel: float
    context_parallel: float
    expert_parallel: float
    pipeline_transfers: float
    bubble: float
    data_parallel: float
    slower_beside_collectives: float
    optimizer: float


class Block(NamedTuple):
    """What depends on tp, cp, ep, micro-batch, recomputation and sequence parallelism alone.

    forward, backward: seconds of a layer with its collectives, backward with what it recomputes.
    tensor, context, expert: seconds of these collectives in both; head: of the last rank, embedding
    included; message: bytes that go to the next pipeline rank.
    """

    layer: tuple
    work: tuple  # seconds of a layer's both passes by kind, then those of recomputation
    forward: float
    backward: float
    tensor: float
    context: float
    expert: float
    head: float
    message: float


@dataclass(frozen=True)
class Job:
    """A model on a cluster with a batch, and how it is implemented."""

    config: object
    cluster: object
    sequence: int
    global_batch: int
    efficiencies: tuple
    card: tuple  # its rates
    recipe: tuple  # bytes per parameter of weights, gradients, optimizer
    flash: bool
    dropout: bool
    fused: bool
    overlap: bool

    def __post_init__(self):
        object.__setattr__(self, "_hash", hash(tuple(vars(self).values())))

    def __hash__(self):
        return self._hash  # of a dozen fields: every remembered answer is found by it

    def __reduce__(self):
        *fields, _ = vars(self).values()
        return Job, tuple(fields)  # another process has other hashes of text


_make_block, _make_step = maker(Block), maker(StepTime)


@lru_cache(maxsize=4096)  # a search asks for the same ones over and over
def block(job, tp, cp, ep, micro_batch, recompute, sequence_parallel):
    """Return the Block of these degrees."""
    config, cluster, e, card = job.config, job.cluster, job.efficiencies, job.card
    tokens = micro_batch * (job.sequence // cp)
    cut = tp if sequence_parallel else 1
    layer = layer_time(
        card,
        config,
        tokens,
        job.sequence,
        tp,
        ep,
        cut,
        job.flash,
        job.dropout,
        job.fused,
        recompute,
    )
    h, t = config.hidden, tokens
    again = recompute == "full"
    tensor = context = expert = 0.0
    message = 2 * t * h  # of a rank's tokens
    if tp > 1:
        # Two sums over the ranks each way; each is a reduce-scatter and an all-gather.
        both = 2 * gather_seconds(route(cluster, e, tp, 1), tp, message)
        tensor = 2 * both
    if cp > 1:
        wire = hop_route(cluster, e, cp, tp)
        hop = 4 * t * (config.kv_heads // tp) * config.head_size / wire.bandwidth + wire.latency
        context = _in_ring((cp - 1) * hop, layer.forward.attention, e) * (1 + again)
        # Keys and values again, and their gradients.
        context += _in_ring(2 * (cp - 1) * hop, layer.backward.attention, e)
        context += (3 + again) * (cp - 1) * e.launch  # of kernels for a block each
    if ep > 1:
        sent = 2 * t // cut * config.active_experts * h
        expert = 2 * all_to_all_seconds(cluster, e, ep, tp, sent)
    forward = sum(layer.forward) + tensor + expert
    backward = sum(layer.backward) + sum(layer.recompute) + (1 + again) * (tensor + expert)
    tables = 3 * matmul_seconds(card, t, config.vocab // tp, h)
    passes = LOGIT_BYTES * t * config.vocab / tp + 3 * message
    head = tables + passes / card.memory + (3 + LOSS_KERNELS + 3) * card.launch
    return _make_block(
        (
            layer,
            (*map(add, layer.forward, layer.backward), sum(layer.recompute)),
            forward,
            backward + context,
            (2 + again) * tensor,
            context,
            (2 + again) * expert,
            head,
            message / tp,  # each of the tp ranks sends its part to the next stage
        )
    )


def _in_ring(sent, attention, efficiencies):
    """Seconds that a ring of keys and values adds to an attention that runs beside it."""
    return max(0, sent - attention) + efficiencies.overlap * min(sent, attention)


def step_time(job, layout, made, part):
    """Return the StepTime of a Layout; made: its Block; part: the last rank's RankParams."""
    a = layout
    m = job.global_batch // (a.dp * a.micro_batch)
    transfers, bubble = pipeline_seconds(
        job, made, part.layers, a.pp, a.tp * a.cp * a.dp, m, a.chunks, a.schedule
    )
    data, slower, optimizer = data_parallel_seconds(
        job, made, part, a.dp * a.cp, a.tp, a.ep, m, a.zero, a.replicas
    )
    work, (matmul, attention, elementwise, launches, again) = part.layers * m, made.work
    return _make_step(
        (
            work * matmul,
            work * attention,
            work * elementwise,
            work * launches,
            work * again,
            m * made.head,
            work * made.tensor,
            work * made.context,
            work * made.expert,
            transfers,
            bubble,
            data,
            slower,
            optimizer,
        )
    )


# Found by the job, whose hash is there; `route` looks at every field of cluster and efficiencies.
@lru_cache(maxsize=4096)
def _group(job, size, stride):
    return route(job.cluster, job.efficiencies, size, stride)


@lru_cache(maxsize=4096)
def _hop(job, stride):
    return neighbour_route(job.cluster, job.efficiencies, stride)


def pipeline_seconds(job, made, layers, pp, stride, m, chunks, schedule):
    """Return seconds of transfers between stages and of the bubble.

    The bubble is the closed form for a pipeline whose last rank alone is slower, by the head: the
    work of all other ranks on one micro-batch, over v (`pipeline_bubble_seconds` has it for equal
    ranks). ZB-H1 fills twice the gradients of weights into it.
    """
    if pp == 1:
        return 0.0, 0.0
    bandwidth, latency, _ = _hop(job, stride)
    transfer = 2 * chunks * (made.message / bandwidth + latency)
    one = layers * (made.forward + made.backward) + transfer
    if schedule == "ZB-H1":
        one -= 2 * layers * made.layer.linear
    return m * transfer, (pp - 1) * one / chunks


def data_parallel_seconds(job, made, part, ranks, tp, ep, m, zero, replicas):
    """Return seconds of collectives that no compute hides, of what they slow, and of the optimizer.

    Stage 0 all-reduces g bytes a parameter once an iteration, stage 1 reduce-scatters them and
    gathers 2 bytes; stage 2 reduces after every micro-batch; stage 3 gathers layer by layer in
    forward and in backward and reduces, for every micro-batch. With overlap each layer's collective
    runs beside a layer's compute; the last one, and those of embedding and head, have none.
    Replicas of the shards (HSDP) add an all-reduce of a rank's shard after each reduce-scatter.
    """
    (w, g, k), e, memory = job.recipe, job.efficiencies, job.card.memory
    layers, layer, _, _, _, ends, shared, experts = part
    shards = ranks // replicas
    held = shards if zero else 1
    updated = shared / held
    if experts:
        updated += experts / max(1, held // ep)
    # Weights are read and written, but written only where the optimizer has masters of them.
    optimizer = updated * (2 * k + g + (2 * w if k <= 2 * w else w)) / memory
    if ranks == 1:
        return 0.0, 0.0, optimizer
    forward, backward = made.forward, made.backward
    slow, latency, _ = _group(job, shards, tp)
    sent = (shards - 1) / shards
    share, lag = layer * sent, (shards - 1) * latency
    if experts:
        alike = max(1, shards // ep)  # ranks with the same experts
        share += experts / layers * ((alike - 1) / alike - sent)
    whole_ends, ends = ends, ends * sent
    gather, reduce = 2 * share / slow + lag, g * share / slow + lag
    gather_ends, reduce_ends = 2 * ends / slow, g * ends / slow
    if replicas > 1:
        across = route(job.cluster, e, replicas, tp * shards)
        both = 2 * g * (replicas - 1) / replicas / across.bandwidth
        reduce += both * layer / shards + 2 * (replicas - 1) * across.latency
        reduce_ends += both * whole_ends / shards
    if zero == 3:
        behind = gather + reduce
        exposed = layers * (max(0, gather - forward) + max(0, behind - backward))
        beside = layers * (min(gather, forward) + min(behind, backward))
        alone = exposed + 2 * gather_ends + reduce_ends
        return m * alone, m * e.overlap * beside, optimizer
    if zero == 0:  # an all-reduce, all within backward
        gather, gather_ends, reduce, reduce_ends = 0.0, 0.0, 2 * reduce, 2 * reduce_ends
    times = m if zero == 2 else 1
    alone = times * reduce_ends + gather_ends
    if not job.overlap:
        return alone + layers * (times * reduce + gather), 0.0, optimizer
    reduce_beside = reduce if reduce < backward else backward
    gather_beside = gather if gather < forward else forward
    others = layers - 1
    alone += times * (reduce + others * (reduce - reduce_beside))
    alone += gather + others * (gather - gather_beside)
    beside = others * (times * reduce_beside + gather_beside)
    return alone, e.overlap * beside, optimizer
