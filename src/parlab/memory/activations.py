"""Bytes that forward keeps for backward, tensor by tensor, in 16 bits.

s is the sequence, b the micro-batch, h hidden, a heads, f ffn, V the vocabulary, e the experts that
a token visits, t the ranks of tensor parallelism, L layers, p pipeline stages, v chunks a rank.
Figures in GiB are the papers' (2^30 bytes).
"""

from typing import NamedTuple

from parlab.memory.layer import (
    RECOMPUTE,
    embedding_mask,
    head_tensors,
    layer_sizes,
    layer_tensors,
    maker,
    vocab_share,
)
from parlab.units import require_bool, require_choice, require_int


class Kept(NamedTuple):
    """One tensor that a layer keeps, or the embedding, or the head, and its bytes on one rank."""

    block: str
    tensor: str
    layer_bytes: int


class ActivationMemory(NamedTuple):
    """Tensors of one layer, the number of layers whose tensors are held at once, and the rest."""

    rows: tuple  # (block, tensor, bytes) of each tensor of a layer
    layers_held: int
    end_rows: tuple = ()  # the same of embedding and head, with all micro-batches that keep them

    @property
    def items(self):
        """The tensors of a layer as Kept."""
        return tuple(map(Kept._make, self.rows))

    @property
    def ends(self):
        """The tensors of embedding and head as Kept."""
        return tuple(map(Kept._make, self.end_rows))

    @property
    def layer_bytes(self):
        """All items together: one layer and one micro-batch."""
        return sum([row[2] for row in self.rows])

    @property
    def total(self):
        """Bytes on one rank."""
        return self.layers_held * self.layer_bytes + sum([row[2] for row in self.end_rows])


_make_memory = maker(ActivationMemory)


def activation_memory(
    config,
    micro_batch,
    *,
    sequence,
    tp=1,
    sequence_parallel=False,
    recompute="none",
    pipeline=1,
    chunks=1,
    dropout=True,
    flash=False,
    pipeline_rank=0,
    ends=False,
    expert_load=1,
):
    """Activations of a transformer's layers on a rank of one pipeline stage, by tensor.

    With GeLU, f = 4h, dropout and 16 bits a layer keeps sbh (10 + 24/t + 5as/ht); sequence
    parallelism cuts the 10 by t too; selective recomputation drops the scores, 5as/h; full keeps
    the layer's input, 2 sbh. Korthikanti et al. (arXiv 2205.05198), sections 4 and 5, table 2.
    "per-op" keeps that input and the results of a flash kernel and of every second matrix product
    (queries, values, first and, if gated, last of the MLP), as torchtitan does.

    Without dropout there are no masks and one copy of the scores: 32 sbh + 2 a s^2 b. A flash
    kernel keeps 4 bytes a head and token instead of scores (log-sum-exp, fp32), also with dropout,
    whose mask it draws again. Grouped-query attention keeps keys and values of `kv_heads` only, as
    a flash kernel does. A gated MLP keeps 8 sbf, not 4 sbf: the gate before and after SiLU, the
    other factor, and the product; a fused kernel keeps less.

    A layer with experts keeps what its router reads and says (E probabilities in fp32, e weights in
    16 bits a token), e copies of each token, as many insides of an MLP, and e outputs for the
    weighted sum: tokens spread evenly, so it is the same however experts spread over ranks.

    The pipeline is 1F1B with micro-batches enough: rank r has p - r in flight; with v > 1 it has
    2 (p-r-1) + (v-1) p + 1 chunks in flight, so the first holds L (1 + (p-1)/(pv)) layers' worth.
    Full recomputation under sequence parallelism keeps the cut input, 2 sbh/t. Left out: statistics
    of norms, integers, and the one layer that recomputation brings back at a time.

    config: a ModelConfig, or any object with its sizes. micro_batch: b. sequence: s, tokens. tp: t,
        must divide heads, kv_heads and ffn, and s with sequence_parallel. pipeline, chunks: p, v;
        their product must divide the layers. pipeline_rank: r, from 0.
    ends: True adds, on the first stage, the mask of the embedding's dropout, and on the last the
        inputs of the last norm and the head and the logits in 16 bits and fp32 (`vocab` divides by
        t): Korthikanti et al., section 4.3.
    expert_load: tokens that come to this rank's experts over the mean, above 1 on the fullest rank.

    Raises ValueError or TypeError for sizes that are not positive ints or don't divide.

    >>> from parlab.models import ModelConfig
    >>> gpt3 = ModelConfig(layers=96, hidden=12288, heads=96, vocab=51200)
    >>> size = {"sequence": 2048, "tp": 8, "pipeline": 8, "chunks": 3}
    >>> activation_memory(gpt3, 1, **size).total / 2**30
    66.84375
    >>> kept = activation_memory(gpt3, 1, **size, sequence_parallel=True, recompute="selective")
    >>> kept.total / 2**30, kept.items[1]
    (12.3515625, Kept(block='attention', tensor='queries', layer_bytes=6291456))
    """
    sizes, kind = layer_sizes(
        config,
        micro_batch,
        sequence,
        tp,
        sequence_parallel,
        dropout,
        flash,
        expert_load,
    )
    held = layers_in_flight(config.layers, pipeline, chunks, pipeline_rank)
    recompute = require_choice("recompute", recompute, RECOMPUTE)
    outside = []
    if require_bool("ends", ends):
        if dropout and pipeline_rank == 0:
            outside.append(embedding_mask(sizes, pipeline, chunks))
        if pipeline_rank == pipeline - 1:
            vocab = require_int("vocab", getattr(config, "vocab", None), minimum=1)
            outside += head_tensors(sizes, vocab_share(vocab, tp))
    return _make_memory((tuple(layer_tensors(sizes, kind, recompute)), held, tuple(outside)))


def activation_memory_bytes(config, micro_batch, *, sequence, **options):
    """Bytes of activations on one rank: the total of `activation_memory`, with its arguments.

    >>> from parlab.models import ModelConfig
    >>> config = ModelConfig(layers=48, hidden=6144, heads=64, vocab=51200)
    >>> activation_memory_bytes(config, 4, sequence=2048, tp=8) / 2**30
    59.25
    """
    return activation_memory(config, micro_batch, sequence=sequence, **options).total


def logits_bytes(tokens, vocab, *, tp=1, element_bytes=4):
    """Bytes of one copy of the logits: tokens x vocab x element_bytes / tp, on the last stage.

    A loss in fp32 holds such a copy beside the 16-bit one, and its gradient may be a third.

    tokens: s b. vocab: V, a multiple of tp, over which it is cut. element_bytes: 4 in fp32.

    >>> [round(logits_bytes(8192, 151_936, element_bytes=e) / 2**30, 3) for e in (4, 2)]
    [4.637, 2.318]
    """
    tokens = require_int("tokens", tokens, minimum=0)
    vocab = require_int("vocab", vocab, minimum=1)
    tp = require_int("tp", tp, minimum=1)
    element_bytes = require_int("element_bytes", element_bytes, minimum=1)
    return tokens * vocab_share(vocab, tp) * element_bytes


def layers_in_flight(layers, pipeline, chunks, rank):
    """Return the layers' worth of activations that a rank of a pipeline holds at most."""
    p = require_int("pipeline", pipeline, minimum=1)
    v = require_int("chunks", chunks, minimum=1)
    rank = require_int("pipeline_rank", rank, minimum=0, maximum=p - 1)
    if layers % (p * v):
        raise ValueError(
            f"pipeline x chunks must divide layers = {layers}, got {p} x {v}: "
            "a stage holds whole layers"
        )
    # Forwards that a rank starts before its first backward has ended.
    held = p - rank if v == 1 else 2 * (p - rank - 1) + (v - 1) * p + 1
    return held * (layers // (p * v))
