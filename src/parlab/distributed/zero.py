"""ZeRO by hand (arXiv 1910.02054): stages 1 and 2, and plain data parallelism beside them.

Every parameter lies flat, filled up with zeros to a multiple of the N ranks, and is cut into N
equal shards. A rank's optimizer knows the rank's shards only, so it keeps 1/N of the states.
Gradients are reduce-scattered to the shards, new weights all-gathered from them.

Left out: buckets, which send many small parameters in one message; sending while backward still
computes; groups other than all ranks. Every rank has to use every parameter in each backward pass,
or the ranks wait for each other's messages.
"""

from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from parlab.distributed import compat
from parlab.distributed.counting import CollectiveCounter
from parlab.distributed.gpt import GPT, TINY, token_batch, token_loss
from parlab.memory.states import ZeroMemory
from parlab.units import require_choice, require_int

LEARNING_RATE = 1e-2
DECAYS, EPSILON, WEIGHT_DECAY = (0.9, 0.999), 1e-8, 0.01  # the defaults of torch.optim.AdamW


class MixedPrecisionAdamW(torch.optim.Optimizer):
    """AdamW (arXiv 1711.05101, algorithm 2), which updates 16-bit weights in fp32.

    Of each weight it keeps a master copy, momentum and variance, from the start: k = 12 bytes.
    Weights of 32 or 64 bits are their own masters: k = 8 in fp32. One parameter is updated after
    another, with two temporaries of its size in fp32; of a DTensor the local shard is.

    >>> weight = nn.Parameter(torch.ones(1000, dtype=torch.bfloat16))
    >>> state = MixedPrecisionAdamW([weight]).state[weight]
    >>> sum(tensor.nbytes for tensor in state.values())
    12000
    """

    @torch.no_grad()
    def __init__(self, parameters, lr=LEARNING_RATE):
        super().__init__(parameters, {"lr": lr})
        self.steps = 0
        for group in self.param_groups:
            for weight in group["params"]:
                mine = compat.local_part(weight)
                narrow = mine.element_size() == 2
                masters = {"master": mine.float()} if narrow else {}
                like = masters.get("master", mine)
                moments = {name: torch.zeros_like(like) for name in ("momentum", "variance")}
                self.state[weight] = masters | moments

    @torch.no_grad()
    def step(self):
        """Update every weight that has a gradient."""
        self.steps += 1
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    self._update(weight, group["lr"])

    def _update(self, weight, lr):
        mine, state = compat.local_part(weight), self.state[weight]
        momentum, variance = state["momentum"], state["variance"]
        master = state.get("master", mine)
        gradient = compat.local_part(weight.grad).to(master.dtype)
        momentum.lerp_(gradient, 1 - DECAYS[0])
        variance.mul_(DECAYS[1]).addcmul_(gradient, gradient, value=1 - DECAYS[1])
        # Both began with 0, which still weighs decay^steps in them.
        weigh_momentum, weigh_variance = (1 - decay**self.steps for decay in DECAYS)
        deviation = variance.sqrt().div_(weigh_variance**0.5).add_(EPSILON)
        master.mul_(1 - lr * WEIGHT_DECAY)
        master.addcdiv_(momentum, deviation, value=-lr / weigh_momentum)
        if master is not mine:
            mine.copy_(master)


class Replicated:
    """Plain data parallelism, ZeRO's stage 0: every rank holds everything, gradients are averaged.

    parameters, make_optimizer : as in `Zero`; the optimizer gets the parameters themselves.
    """

    def __init__(self, parameters, make_optimizer):
        self.weights = list(parameters)
        self.optimizer = make_optimizer(self.weights)

    @torch.no_grad()
    def step(self):
        """Average the gradients over the ranks, then update all weights."""
        for weight in self.weights:
            dist.all_reduce(weight.grad)
            weight.grad.div_(dist.get_world_size())
        self.optimizer.step()


class Zero:
    """ZeRO of stage 1 or 2 around an optimizer that treats every element alike, as Adam does.

    stage 1 : a rank's whole gradient stays until `step`, which reduce-scatters and frees it.
    stage 2 : as soon as a backward pass has produced a parameter's gradient, it is reduce-scattered
        and added to the shard's, and the whole one is freed; so in each micro-batch.

    parameters : the model's, each once. Where N does not divide a size, the parameter becomes a
        view of a longer vector.
    make_optimizer : called with the list of this rank's shards; the result is in `optimizer`.

    Gradients are averaged over the ranks.
    """

    def __init__(self, parameters, make_optimizer, *, stage):
        self.stage = require_int("stage", stage, minimum=1, maximum=2)
        self.n, rank = dist.get_world_size(), dist.get_rank()
        self.whole, self.shards = {}, {}
        for weight in parameters:
            flat = fill_up(weight.detach().reshape(-1), self.n)
            weight.data = flat[: weight.numel()].view_as(weight)
            self.whole[weight] = flat
            self.shards[weight] = nn.Parameter(flat.view(self.n, -1)[rank])  # a view as well
            if stage == 2:
                weight.register_post_accumulate_grad_hook(self._reduce_scatter)
        self.optimizer = make_optimizer(list(self.shards.values()))

    def step(self):
        """Update this rank's shards, then fetch all the others."""
        if self.stage == 1:
            for weight in self.shards:
                self._reduce_scatter(weight)
        self.optimizer.step()
        for weight, shard in self.shards.items():
            compat.all_gather_rows(self.whole[weight], shard.detach())

    @torch.no_grad()
    def _reduce_scatter(self, weight):
        shard = self.shards[weight]
        mine = torch.empty_like(shard)
        compat.reduce_scatter_rows(mine, fill_up(weight.grad.reshape(-1), self.n))
        mine.div_(self.n)
        if shard.grad is None:
            shard.grad = mine
        else:  # there were micro-batches before
            shard.grad.add_(mine)
        weight.grad = None


def fill_up(flat, n):
    """A vector, with zeros at its end up to a multiple of n; itself if its size is one.

    >>> fill_up(torch.ones(5), 3).tolist()
    [1.0, 1.0, 1.0, 1.0, 1.0, 0.0]
    """
    missing = -len(flat) % n
    return F.pad(flat, (0, missing)) if missing else flat


def filled_up_params(sizes, n):
    """Number of parameters when each is filled up to a multiple of n: what N equal shards hold.

    >>> filled_up_params([5, 6], 3)
    12
    """
    return sum(-(-size // n) * n for size in sizes)


def held_bytes(weights, optimizer):
    """Bytes of weights, gradients and optimizer that this process holds; shared storages once."""
    owned = [weight for group in optimizer.param_groups for weight in group["params"]]
    gradients = [weight.grad for weight in (*weights, *owned) if weight.grad is not None]
    states = [tensor for state in optimizer.state.values() for tensor in state.values()]
    return ZeroMemory(*map(_storage_bytes, (weights, gradients, states)))


def _storage_bytes(tensors):
    storages = [compat.local_part(tensor).untyped_storage() for tensor in tensors]
    return sum({id(storage): storage.nbytes() for storage in storages}.values())


@dataclass(frozen=True)
class ZeroTraining:
    """What some steps of training left on one rank.

    losses: of the global batch, before each step. weights: all parameters at the end, flat.
    held: bytes on this rank when the last backward pass has ended, before the step.
    sent: bytes that this rank sends in the last step, by operation, if every call runs on a ring.
    calls: number of collectives in the last step, as {(phase, operation): number}.
    """

    losses: tuple[float, ...]
    weights: np.ndarray
    held: ZeroMemory
    sent: dict[str, int]
    calls: dict[tuple[str, str], int]


def train(stage, rows=12, steps=3, *, micro_batches=1, config=TINY, dtype="float64", seed=0):
    """Train a small GPT with AdamW under ZeRO; every rank calls this alike. Return ZeroTraining.

    Parameters
    ----------
    stage : 0, 1 or 2.
    rows : sequences in the global batch, shared out over the ranks and then over micro-batches.
        The same batch in every step.
    micro_batches : m, backward passes before each step.
    config : a `GPTConfig`.
    dtype : "float64", "float32" or "bfloat16", of weights and gradients.

    >>> from parlab.distributed.launch import run_ranks
    >>> for stage in range(3):  # bytes a parameter: held by a rank, and sent by it
    ...     rank = run_ranks(train, 4, args=(stage,))[0]
    ...     print(stage, rank.held.total / TINY.n_params, sum(rank.sent.values()) / TINY.n_params)
    0 32.0 12.0
    1 20.0 12.0
    2 14.0 12.0
    """
    require_int("stage", stage, minimum=0, maximum=2)
    m = require_int("micro_batches", micro_batches, minimum=1)
    dtype = getattr(torch, require_choice("dtype", dtype, ("float64", "float32", "bfloat16")))
    tokens, targets = token_batch(config, require_int("rows", rows, minimum=1), seed)
    mine = torch.arange(rows).tensor_split(dist.get_world_size())[dist.get_rank()]
    model = GPT(config, seed).to(dtype)
    weights = list(model.parameters())
    if stage:
        parallel = Zero(weights, MixedPrecisionAdamW, stage=stage)
    else:
        parallel = Replicated(weights, MixedPrecisionAdamW)
    losses = []
    for _ in range(require_int("steps", steps, minimum=1)):
        loss = torch.zeros((), dtype=torch.float64)
        with CollectiveCounter() as counter:
            for part in mine.tensor_split(m):
                # The ranks' mean of these sums is the mean over all tokens, however rows are split.
                summed = token_loss(model(tokens[part]), targets[part], "sum")
                mean = summed * dist.get_world_size() / targets.numel()
                mean.backward()
                loss += mean.detach()
            held = held_bytes(weights, parallel.optimizer)
            parallel.step()
        model.zero_grad()
        parallel.optimizer.zero_grad()
        dist.all_reduce(loss, op=dist.ReduceOp.AVG)
        losses.append(loss.item())
    flat = torch.cat([weight.detach().reshape(-1) for weight in weights])
    sent = {op: counter.ring_bytes(op) for op in sorted({call.op for call in counter.calls})}
    return ZeroTraining(tuple(losses), flat.double().numpy(), held, sent, counter.summary())
