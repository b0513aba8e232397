"""Data parallelism on real ranks: by hand, by DistributedDataParallel, and serially beside them.

All functions but `train_serial` are called by every rank alike, inside `run_ranks` or under
torchrun. The global batch is the same for all of them: the ranks share out its rows as
`numpy.array_split` does, so that some have one row more, or none.

Results are NumPy arrays in which all parameters lie flat, one after the other, as the model
defines them: two runs compare in one line.
"""

from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from parlab.distributed import compat
from parlab.distributed.gpt import GPT, IGNORE, TINY, token_batch, token_loss
from parlab.units import require_choice, require_int

LEARNING_RATE, MOMENTUM = 0.1, 0.9
WEIGHTINGS = ("tokens", "ranks")


@dataclass(frozen=True)
class Training:
    """What k steps of training left on one rank.

    losses: of the global batch, before each step (k numbers); under weighting "ranks" the mean of
        the ranks' means.
    gradients: as the optimizer got them, shape (k, parameters).
    before, weights: all parameters at the start and at the end, shape (parameters,).
    """

    losses: tuple[float, ...]
    gradients: np.ndarray
    before: np.ndarray
    weights: np.ndarray


def train_serial(rows=8, steps=3, *, lengths=None, config=TINY, dtype="float64", seed=0):
    """Train a small GPT on the whole batch in this process: what every parallel run must equal.

    Parameters
    ----------
    rows : sequences in the global batch, the same batch in every step.
    steps : steps of SGD with momentum, k.
    lengths : for each row, how many of its targets count; None counts them all.
    config : a `GPTConfig`.
    dtype : "float64" or "float32".
    seed : of weights and batch.

    >>> training = train_serial(rows=4, steps=3)
    >>> training.losses[0] > training.losses[-1]
    True
    """
    model, tokens, targets = _model_and_batch(rows, lengths, config, dtype, seed)
    scale = 1 / _count(targets)
    return _train(model, model, tokens, targets, scale, steps, after_backward=lambda: None)


def train_by_hand(
    rows=8, steps=3, *, weighting="tokens", lengths=None, config=TINY, dtype="float64", seed=0
):
    """Data parallelism without a wrapper: average each gradient over the ranks, then step.

    Every rank holds all weights and its own optimizer, and takes its rows. A rank without rows has
    zero gradients and takes part all the same: the others wait for it. A NaN in one rank's rows is
    in every rank's gradients after the all-reduce, and in all weights after the step.

    weighting: "tokens" divides each rank's summed loss by all ranks' mean number of tokens, so that
        the average over the ranks is the mean over all tokens, for any split. "ranks" divides by
        the rank's own number: the usual code, exact for equal shards only.

    The other parameters are those of `train_serial`.

    >>> from parlab.distributed.launch import run_ranks
    >>> by_hand = run_ranks(train_by_hand, 2, args=(4,))
    >>> np.array_equal(by_hand[0].weights, by_hand[1].weights)
    True
    >>> np.allclose(by_hand[0].weights, train_serial(4).weights, rtol=0, atol=1e-12)
    True
    """
    model, tokens, targets = _model_and_batch(rows, lengths, config, dtype, seed)
    scale = _scale(weighting, targets)

    def average_gradients():
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad, op=dist.ReduceOp.AVG)

    mine = _my_rows(rows)
    return _train(model, model, tokens[mine], targets[mine], scale, steps, average_gradients)


def train_ddp(
    rows=8,
    steps=3,
    *,
    weighting="tokens",
    lengths=None,
    config=TINY,
    dtype="float64",
    seed=0,
    cap_mb=None,
):
    """The same by `DistributedDataParallel`, which averages during the backward pass.

    cap_mb: its `bucket_cap_mb`, in MiB. The other parameters are those of `train_by_hand`.
    """
    model, tokens, targets = _model_and_batch(rows, lengths, config, dtype, seed)
    scale = _scale(weighting, targets)
    ddp = DistributedDataParallel(model, bucket_cap_mb=compat.bucket_cap_mb(cap_mb))
    mine = _my_rows(rows)
    return _train(model, ddp, tokens[mine], targets[mine], scale, steps, lambda: None)


def _train(model, forward, tokens, targets, scale, steps, after_backward):
    require_int("steps", steps, minimum=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)
    before = _flat(model.parameters())
    losses, gradients = [], []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = scale * token_loss(forward(tokens), targets, "sum")
        loss.backward()
        after_backward()
        losses.append(_mean_over_ranks(loss))
        gradients.append(_flat(parameter.grad for parameter in model.parameters()))
        optimizer.step()
    return Training(tuple(losses), np.stack(gradients), before, _flat(model.parameters()))


def token_weighted_step(
    lengths, *, weighting="tokens", config=TINY, dtype="float64", seed=0, cap_mb=None
):
    """One DDP step with gradient accumulation over sequences of different lengths.

    Each rank adds up its micro-batches' gradients under `no_sync`, forward and backward, and the
    last one's backward averages the sums over the ranks. Returns (loss, gradient).

    Parameters
    ----------
    lengths : lengths[r][j] is the number of targets in micro-batch j of rank r, which is one
        sequence; every rank has the same number of micro-batches, and every number is at least 1.
    weighting : what each micro-batch's summed loss is divided by, and so what the step averages.
        "tokens" : all ranks' number of tokens, found by an all-reduce, over the number of ranks:
            the mean over all tokens, as in ``train_serial(lengths=...)``.
        "ranks" : the rank's own tokens in all its micro-batches: each rank counts alike.
        "micro_batches" : the micro-batch's own tokens, times the number of micro-batches: the mean
            of the means.
        "averaged_again" : all ranks' number of tokens, times the number of micro-batches: a global
            mean that is then averaged over micro-batches and over ranks as if it were a local one.
            Loss and gradient are too small by exactly ranks x micro-batches.
    """
    choices = (*WEIGHTINGS, "micro_batches", "averaged_again")
    weighting = require_choice("weighting", weighting, choices)
    n, accumulated = dist.get_world_size(), len(lengths[0])
    if len(lengths) != n or any(len(of_rank) != accumulated for of_rank in lengths):
        raise ValueError(
            f"lengths must hold one list for each of the {n} ranks, all equally long, got {lengths}"
        )
    flat = [require_int("lengths", k, minimum=1) for of_rank in lengths for k in of_rank]
    model, tokens, targets = _model_and_batch(len(flat), flat, config, dtype, seed)
    first = dist.get_rank() * accumulated
    mine = slice(first, first + accumulated)

    my_tokens = (targets[mine] != IGNORE).sum()
    all_tokens = my_tokens.clone()
    dist.all_reduce(all_tokens)
    ddp = DistributedDataParallel(model, bucket_cap_mb=compat.bucket_cap_mb(cap_mb))
    losses = []
    for j in range(accumulated):
        row = slice(first + j, first + j + 1)
        divisor = {
            "tokens": all_tokens / n,
            "ranks": my_tokens,
            "micro_batches": (targets[row] != IGNORE).sum() * accumulated,
            "averaged_again": all_tokens * accumulated,
        }[weighting]
        with ddp.no_sync() if j < accumulated - 1 else nullcontext():
            loss = token_loss(ddp(tokens[row]), targets[row], "sum") / divisor
            loss.backward()
        losses.append(loss.detach())
    gradient = _flat(parameter.grad for parameter in model.parameters())
    return _mean_over_ranks(sum(losses)), gradient


def _model_and_batch(rows, lengths, config, dtype, seed):
    require_int("rows", rows, minimum=1, why="the mean over no rows does not exist")
    dtype = getattr(torch, require_choice("dtype", dtype, ("float64", "float32")))
    tokens, targets = token_batch(config, rows, seed, lengths)
    return GPT(config, seed).to(dtype), tokens, targets


def _my_rows(rows):
    """This rank's slice of the rows, by the sizes of `numpy.array_split`."""
    n, rank = dist.get_world_size(), dist.get_rank()
    size, longer = divmod(rows, n)
    start = rank * size + min(rank, longer)
    return slice(start, start + size + (rank < longer))


def _scale(weighting, targets):
    weighting = require_choice("weighting", weighting, WEIGHTINGS)
    if weighting == "tokens":
        return dist.get_world_size() / _count(targets)
    return 1 / max(1, int((targets[_my_rows(len(targets))] != IGNORE).sum()))


def _count(targets):
    count = int((targets != IGNORE).sum())
    if count == 0:
        raise ValueError("lengths must count at least one target: the mean over none is undefined")
    return count


def _mean_over_ranks(loss):
    loss = loss.detach().clone()
    if dist.is_initialized():
        dist.all_reduce(loss, op=dist.ReduceOp.AVG)
    return loss.item()


def _flat(tensors):
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors]).numpy().copy()
