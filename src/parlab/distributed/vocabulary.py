"""Embedding, head and cross-entropy with the vocabulary cut over the ranks.

Rank r holds v / N consecutive rows of the embedding and computes these tokens' logits only, which
are never gathered: a loss needs three numbers per token of every rank (arXiv 1909.08053,
section 3).

Shapes in comments: b rows of a batch, s positions, h hidden size, v vocabulary, N ranks.
"""

import torch
import torch.distributed as dist
from torch.nn import functional as F

from parlab.distributed.gpt import IGNORE, token_loss
from parlab.distributed.ring import all_reduce
from parlab.distributed.sharding import f, g, require_shares
from parlab.units import require_choice

WHOLE_ROWS = "a rank holds vocab / N rows; pad the table, and give padded logits no weight"


def vocabulary_shards(table, n):
    """Cut an embedding (v, h), or its gradient, as n ranks hold it: v / N rows each."""
    require_shares("vocab", table.shape[0], n, WHOLE_ROWS)
    return list(table.chunk(n))


def embed(tokens, rows):
    """Look tokens (b, s) up in a table of which this rank holds `rows` (v / N, h): (b, s, h).

    A rank gives 0 for the tokens of others, and g sums.

    Raises ValueError for a token outside the vocabulary, which no rank would know.
    """
    index, mine = _on_this_rank(tokens, rows.shape[0], "tokens")
    return g(F.embedding(index, rows) * mine.unsqueeze(-1))


def loss(logits, targets, reduction="mean"):
    """`gpt.token_loss` of the logits (b, s, v / N) of this rank's tokens; the same on every rank.

    log(sum over all ranks of exp(logit - max)) - (logit of the target - max), where max is the
    largest logit on any rank: with a rank's own, sums could not be added, and without one exp
    would leave the range of its dtype.

    Raises ValueError for a target outside the vocabulary that is not `IGNORE`.
    """
    reduction = require_choice("reduction", reduction, ("mean", "sum"))
    if logits.dtype in (torch.bfloat16, torch.float16):
        logits = logits.float()
    total = _CrossEntropy.apply(logits, targets).sum()
    return total if reduction == "sum" else total / (targets != IGNORE).sum().clamp(min=1)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, targets):
        index, mine = _on_this_rank(targets, logits.shape[-1], "targets", IGNORE)
        largest = logits.amax(-1, keepdim=True).contiguous()  # (b, s, 1)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        shifted = logits - largest
        exponentials = shifted.exp()
        target = shifted.gather(-1, index.unsqueeze(-1)).squeeze(-1) * mine  # 0 on other ranks
        denominator, target = all_reduce(torch.stack([exponentials.sum(-1), target]))  # (b, s) each
        ctx.save_for_backward(exponentials / denominator.unsqueeze(-1), index, mine, targets)
        return (denominator.log() - target) * (targets != IGNORE)

    @staticmethod
    def backward(ctx, gradient):
        softmax, index, mine, targets = ctx.saved_tensors
        one_hot = torch.zeros_like(softmax).scatter_(-1, index.unsqueeze(-1), 1.0)
        counted = gradient * (targets != IGNORE)
        return (softmax - one_hot * mine.unsqueeze(-1)) * counted.unsqueeze(-1), None


def _on_this_rank(tokens, n_rows, name, ignored=None):
    """Row of each token in this rank's part, 0 for the tokens of others, and which are its own."""
    vocab = n_rows * dist.get_world_size()
    outside = (tokens < 0) | (tokens >= vocab)
    if ignored is not None:
        outside &= tokens != ignored
    if outside.any():
        raise ValueError(
            f"{name} must lie from 0 to {vocab - 1}, got {tokens[outside][0].item()}: "
            "no rank holds it"
        )
    row = tokens - n_rows * dist.get_rank()
    mine = (row >= 0) & (row < n_rows)
    return row.where(mine, 0), mine


def check_vocabulary(vocab=32, hidden=8, rows=2, sequence=6, seed=0):
    """Embedding, tied head and loss cut over the ranks, compared with the whole ones in float64.

    Returns the largest absolute difference of the embedded tokens, of the loss and of this rank's
    rows of the table's gradient: {"embedded": .., "loss": .., "table": ..}.

    Raises ValueError where the ranks cannot share the vocabulary.

    >>> from parlab.distributed.launch import run_ranks
    >>> max(max(rank.values()) for rank in run_ranks(check_vocabulary, 2)) < 1e-13
    True
    """
    generator = torch.Generator().manual_seed(seed)
    table = torch.randn(vocab, hidden, generator=generator, dtype=torch.float64)
    tokens, targets = torch.randint(vocab, (2, rows, sequence), generator=generator)
    targets[0, 0] = IGNORE
    n, rank = dist.get_world_size(), dist.get_rank()
    part = vocabulary_shards(table, n)[rank].clone().requires_grad_()
    table.requires_grad_()

    expected = F.embedding(tokens, table)
    expected_loss = token_loss(expected @ table.T, targets)
    expected_loss.backward()
    embedded = embed(tokens, part)
    found_loss = loss(f(embedded) @ part.T, targets)
    found_loss.backward()

    pairs = {
        "embedded": (embedded, expected),
        "loss": (found_loss, expected_loss),
        "table": (part.grad, vocabulary_shards(table.grad, n)[rank]),
    }
    return {name: (ours - whole).abs().max().item() for name, (ours, whole) in pairs.items()}
