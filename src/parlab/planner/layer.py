"""Seconds of one layer on one rank with one micro-batch, by what bounds its kernels.

T is the rank's tokens, h hidden, a heads, k kv_heads, d their size, f ffn, t the ranks of tensor
parallelism. Bytes per element and pass are counted kernel by kernel, in 16 bits.
"""

from functools import lru_cache
from typing import NamedTuple


class Seconds(NamedTuple):
    """What a rank's kernels take, by what bounds them."""

    matmul: float
    attention: float
    elementwise: float
    launches: float


class LayerTime(NamedTuple):
    """One layer, without communication. Recomputation runs within backward.

    linear: of forward's matrix products with weights; backward has them twice, half of it for the
        gradients of the weights.
    """

    forward: Seconds
    backward: Seconds
    recompute: Seconds
    linear: float


class Card(NamedTuple):
    """A card's rates as this module needs them."""

    matmul: float  # FLOP/s
    tile: float  # bytes/s of shared memory, times the tile's edge, over 4 bytes
    attention: float  # FLOP/s
    memory: float  # bytes/s, of element-wise kernels
    raw_memory: float  # bytes/s, of the data sheet
    launch: float


SHARED_MEMORY_PER_MEMORY = 10  # of bandwidth: 9.6 on an A100, 10 on an H100


def card_of(gpu, efficiencies):
    """Return the Card of a GPU; without a bandwidth of shared memory, 10 x that of its memory.

    A card without bf16 units (T4) computes in fp16.
    """
    e, memory = efficiencies, gpu.memory_bandwidth_bytes_per_s
    peak = gpu.bf16_flop_per_s or gpu.fp16_flop_per_s
    shared = gpu.l1_bandwidth_bytes_per_s or SHARED_MEMORY_PER_MEMORY * memory
    return Card(
        matmul=e.matmul_peak * peak,
        tile=shared * e.matmul_tile / 4,
        attention=e.attention * shared,
        memory=e.memory * memory,
        raw_memory=memory,
        launch=e.launch,
    )


def matmul_seconds(card, m, n, k):
    """Seconds of a product of m x k and k x n: FLOP, operands to each tile, and each matrix once.

    2 m n k / peak + 4 m n k / (tile x shared memory's bandwidth) + 2 (mn + mk + kn) / memory's.
    """
    volume = m * n * k
    return (
        2 * volume / card.matmul
        + volume / card.tile
        + 2 * (m * n + m * k + k * n) / card.raw_memory
    )


@lru_cache(maxsize=4096)  # a search asks for the same ones over and over
def layer_time(card, config, tokens, sequence, tp, ep, cut, flash, dropout, fused, recompute):
    """Return the LayerTime of `tokens` tokens of a rank whose queries see `sequence` keys.

    Attention without a flash kernel is two batched products, a softmax and a dropout of
    tokens x sequence scores; with one, half of the products (causal), and 2.5 times that in
    backward (arXiv 2307.08691, section 3.1). fused: norms, activations, rotary embedding and the
    sum with the residual in one kernel each, as Megatron and torch.compile do it; False: as eager
    PyTorch does. cut: tp under sequence parallelism, else 1. Experts see evenly spread tokens.
    """
    h, a, kv, d, f, gated, experts, active = config.layer_shape
    t = tokens
    wide = t // cut * h
    queries, keys = t * a * d // tp, t * kv * d // tp

    def product(m, n, k):
        return matmul_seconds(card, m, n, k)

    linear = product(t, (a + 2 * kv) * d // tp, h) + product(t, h, a * d // tp)
    copies, here = t, 1
    if experts > 1:
        linear += product(t, experts, h)
        copies, here = t * active, experts // ep
    each = copies / here
    linear += here * (product(each, (1 + gated) * f // tp, h) + product(each, h, f // tp))
    kernels = 2 + 2 * here

    scores = t * sequence * a // tp
    if flash:
        forward = 2 * scores * d / card.attention
        attention = (forward, 2.5 * forward)
        streams, attention_kernels = (0, 0), 1
    else:
        heads = t * a // (tp * sequence)  # matrices of sequence x sequence scores
        pair = product(sequence, sequence, d) + product(sequence, d, sequence)
        attention = (heads * pair, 2 * heads * pair)
        streams, attention_kernels = ((9, 11) if dropout else (4, 6)), 4
    inner = copies * f // tp
    first, second, norm_kernels, inner_kernels = _streams(
        config.norm == "rms", gated, dropout, fused
    )
    (norm_f, sum_f, inner_f, rotary_f), (norm_b, sum_b, inner_b, rotary_b) = first, second
    rotary = 0 if config.positions else queries + keys
    biases = 2 * (queries + 2 * keys + 2 * wide + inner) if config.biases else 0
    moved = 8 * copies * h if experts > 1 else 0  # tokens to their experts and back
    bytes_f = 2 * (norm_f + sum_f) * wide + inner_f * inner + rotary_f * rotary + moved
    bytes_b = 2 * (norm_b + sum_b) * wide + inner_b * inner + rotary_b * rotary + biases + moved
    forward = Seconds(
        linear,
        attention[0] + streams[0] * scores / card.memory,
        bytes_f / card.memory,
        (kernels + attention_kernels + norm_kernels + inner_kernels) * card.launch,
    )
    backward = Seconds(
        2 * linear,
        attention[1] + streams[1] * scores / card.memory,
        bytes_b / card.memory,
        (2 * kernels + attention_kernels + 2 * norm_kernels + 2 * inner_kernels) * card.launch,
    )
    if recompute == "full":
        again = forward
    elif recompute == "selective":
        again = Seconds(0, forward.attention, 0, attention_kernels * card.launch)
    elif recompute == "per-op":
        again = Seconds(linear / 2, 0, forward.elementwise, forward.launches - 2 * card.launch)
    else:
        again = Seconds(0, 0, 0, 0)
    return LayerTime(forward, backward, again, linear)


def _streams(rms, gated, dropout, fused):
    """Bytes per element that norm, residual sum, MLP's inside and rotary embedding move.

    Forward's four and backward's four, then kernels of norms and sums, and of the rest. A sum reads
    two and writes one (6); a dropout reads, writes and has a mask of a byte (5), and is one kernel
    with the sum before it if fused (7 forward; backward writes both gradients). Fused, a norm reads
    and writes (4); eager RMSNorm casts to fp32, squares, averages, scales, casts back and weighs:
    34 bytes.
    """
    sums = (6, 6)
    if fused:
        norms = (4, 6)
        sums = (7, 11) if dropout else sums
        inner = (6, 10) if gated else (4, 6)
        rotary, kernels = (4, 4), (4, 2)
    else:
        norms = (34, 60) if rms else (4, 6)
        sums = (11, 11) if dropout else sums
        inner = (10, 20) if gated else (4, 6)
        rotary, kernels = (20, 20), (14 if rms else 4, 8 if rms else 2)
    forward = (norms[0], sums[0], inner[0], rotary[0])
    backward = (norms[1], sums[1], inner[1], rotary[1])
    return forward, backward, *kernels
