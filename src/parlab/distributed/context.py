"""Context parallelism between real processes: a GPT whose sequence is cut, against the whole one.

Shapes in comments: b rows of a batch, m = s / N positions of this rank, v vocabulary. The sequence
is cut over all ranks of the default process group.
"""

import copy
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn

from parlab.distributed.agreement import random_weights
from parlab.distributed.counting import CollectiveCounter
from parlab.distributed.gpt import GPT, GPTConfig, token_loss
from parlab.distributed.ring import all_reduce
from parlab.distributed.ring_attention import RingAttention, tokens_of_ranks
from parlab.units import require_int


class ContextAttention(nn.Module):
    """A `gpt.Attention` over the positions of all ranks, of which this rank has its own."""

    def __init__(self, attention, balanced):
        super().__init__()
        self.q, self.k, self.v, self.o = attention.q, attention.k, attention.v, attention.o
        self.head_size, self.balanced = attention.head_size, balanced

    def forward(self, x):
        q, k, v = (
            layer(x).unflatten(-1, (-1, self.head_size)).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        out = RingAttention.apply(q, k, v, self.balanced)
        return self.o(out.transpose(1, 2).flatten(2))


class ContextGPT(nn.Module):
    """A `GPT` that sees this rank's tokens (b, m) of a sequence: weights whole, positions cut.

    Only attention communicates. Norms, MLPs, embedding and head work token by token, so each rank
    has its own tokens' part of every weight's gradient: sum them, as in data parallelism.
    """

    def __init__(self, model, balanced=True):
        super().__init__()
        if model.config.dropout:
            raise ValueError(
                f"dropout must be 0 here, got {model.config.dropout}: it is left out of the ring"
            )
        self.model, self.balanced = copy.deepcopy(model), balanced
        for block in self.model.blocks:
            block.attention = ContextAttention(block.attention, balanced)

    def forward(self, tokens):
        sequence = tokens.shape[1] * dist.get_world_size()
        mine = tokens_of_ranks(sequence, self.balanced)[dist.get_rank()]
        model = self.model
        x = model.tokens(tokens) + model.positions.weight[mine]  # not the first m positions
        for block in model.blocks:
            x = block(x)
        return model.head(model.norm(x))  # (b, m, v)


def check_context(
    layers=2, hidden=32, heads=4, kv_heads=None, sequence=16, rows=2, balanced=True, seed=0
):
    """Train one step of a GPT with its sequence cut over the ranks, against the whole one, float64.

    Targets are shifted before the sequence is cut, since the next token may be on another rank, and
    the loss is the mean over all tokens: sums of every rank over the number of all.

    Returns the largest absolute difference of the loss, of this rank's logits, and of every
    parameter's gradient: {"loss": .., "logits": .., "tokens.weight": .., ..}.

    >>> from parlab.distributed.launch import run_ranks
    >>> max(max(rank.values()) for rank in run_ranks(check_context, 2)) < 1e-11
    True
    """
    model, tokens, targets = _example(layers, hidden, heads, kv_heads, sequence, rows, seed)
    ours, our_logits, our_loss = _step(model, tokens, targets, balanced)
    logits = model(tokens)
    loss = token_loss(logits, targets)
    loss.backward()

    mine = tokens_of_ranks(sequence, balanced)[dist.get_rank()]
    pairs = {"loss": (our_loss, loss), "logits": (our_logits, logits[:, mine])}
    for (name, whole), cut in zip(model.named_parameters(), ours.parameters(), strict=True):
        pairs[name] = (cut.grad, whole.grad)
    return {name: (found - other).abs().max().item() for name, (found, other) in pairs.items()}


def count_context(
    layers=2, hidden=32, heads=4, kv_heads=None, sequence=16, rows=2, balanced=True, seed=0
):
    """Count what that step sends; returns this rank's CollectiveCounter.

    Attention's messages have the op "send" and the phases "forward" and "backward"; the sums of
    the loss and of the weights' gradients have the phase "after".

    >>> from parlab.distributed.launch import run_ranks
    >>> counter = run_ranks(count_context, 4)[0]
    >>> counter.count("send", "forward"), counter.count("send", "backward")  # 2 layers, 3 hops
    (6, 12)
    """
    model, tokens, targets = _example(layers, hidden, heads, kv_heads, sequence, rows, seed)
    with CollectiveCounter() as counter:
        _step(model, tokens, targets, balanced, counter.named_phase("after"))
    return counter


def _example(layers, hidden, heads, kv_heads, sequence, rows, seed):
    """A model with large weights, so that attention tells keys apart, and tokens and targets."""
    require_int("rows", rows, minimum=1)
    sizes = {"layers": layers, "hidden": hidden, "heads": heads, "kv_heads": kv_heads}
    model = random_weights(GPT(GPTConfig(vocab=32, sequence=sequence, **sizes)), seed)
    generator = torch.Generator().manual_seed(seed)
    text = torch.randint(32, (rows, sequence + 1), generator=generator)
    return model, text[:, :-1], text[:, 1:]


def _step(model, tokens, targets, balanced, after=None):
    """Forward, backward, and the sums over the ranks: the cut model, its logits, the loss."""
    ours = ContextGPT(model, balanced)
    mine = tokens_of_ranks(tokens.shape[1], balanced)[dist.get_rank()]
    logits = ours(tokens[:, mine])
    loss = token_loss(logits, targets[:, mine], "sum") / targets.numel()
    loss.backward()
    with after or nullcontext():
        loss = all_reduce(loss)
        for parameter in ours.parameters():
            parameter.grad = all_reduce(parameter.grad)
    return ours, logits.detach(), loss
