"""What a chapter shows of pipelines on real ranks, beside `pipeline_step`."""

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from parlab.distributed import compat, stages
from parlab.distributed.gpt import GPT, token_batch, token_loss
from parlab.distributed.pipeline import (
    DEEP,
    Result,
    gradients_of,
    model_and_batch,
    require_micro_batches,
)
from parlab.distributed.pipeline_rank import KeptBytes
from parlab.distributed.torch_schedules import torch_schedule

EXPLICIT = replace(DEEP, attention="explicit")


def naive_two_stages(rows=8, config=DEEP, seed=0):
    """One step on two ranks, each with half of the layers; one of them always waits."""
    lower, upper = stages.cut(GPT(config, seed).double(), 2)
    tokens, targets = token_batch(config, rows, seed)
    if dist.get_rank() == 0:
        x = lower(tokens)
        dist.send(x.detach(), dst=1)
        gradient = torch.empty_like(x)
        dist.recv(gradient, src=1)
        x.backward(gradient)
        return Result(None, gradients_of(lower))
    x = torch.empty(rows, config.sequence, config.hidden, dtype=torch.float64)
    dist.recv(x, src=0)
    x.requires_grad_()
    loss = token_loss(upper(x), targets)
    loss.backward()
    dist.send(x.grad, dst=0)
    return Result(loss.item(), gradients_of(upper))


class TorchStep(NamedTuple):
    """What `torch_step` left on one rank; the fields are those of `pipeline.Step`."""

    loss: float | None
    gradients: dict[str, np.ndarray]
    peak_in_flight: int


def torch_step(name, rows, micro_batches, chunks=1, *, config=DEEP, dtype="float64", seed=0):
    """The step of `pipeline_step` by torch.distributed.pipelining, with the same stages.

    name: one of `torch_schedules.TORCH_SCHEDULES`; torch 2.11 cannot run ZBVZeroBubble on gloo.
    rows, config, dtype, seed: as in `pipeline_step`; the head must not be tied. micro_batches,
    chunks: m, v. torch holds input and output of a pass until its B or I, not until W.

    Raises ValueError or TypeError before any message.

    >>> from parlab.distributed.launch import run_ranks
    >>> [step.peak_in_flight for step in run_ranks(torch_step, 2, args=("1F1B", 4, 4))]
    [2, 1]
    """
    require_micro_batches(rows, micro_batches)
    if config.tied:
        raise ValueError("config.tied must be False: torch leaves the sum over both tables to you")
    schedule = torch_schedule(name, dist.get_world_size(), micro_batches, chunks)
    model, tokens, targets = model_and_batch(rows, config, dtype, seed)
    parts = stages.cut(model, len(schedule.ranks))
    numbers = schedule.stages[dist.get_rank()]
    mine = [parts[number] for number in numbers]
    pipeline, peak = compat.torch_pipeline(name, mine, numbers, micro_batches, token_loss)
    losses = []
    inputs = [tokens] if mine[0].first else []
    last = any(part.last for part in mine)
    pipeline.step(*inputs, target=targets if last else None, losses=losses if last else None)
    loss = sum(map(float, losses)) / micro_batches if last else None
    return TorchStep(loss, gradients_of(*mine), peak())


class SplitCost(NamedTuple):
    """What the actions of one stage compute and keep; see `split_backward_cost`.

    flops: by action; "two calls" stands for two of `torch.autograd.grad` in place of I and W.
    kept_bytes: by F, until B or W. gradient_bytes: by I besides, until W.
    """

    flops: dict[str, int]
    kept_bytes: int
    gradient_bytes: int


def split_backward_cost(rows=2, config=EXPLICIT):
    """Count what I and W cost, for all blocks of a GPT as one stage, in float64.

    Matrix products of L layers and s b tokens, attention's at masked positions too:

        F   L (24 s b h^2 + 4 s^2 b h)      B           2 F
        I   L (24 s b h^2 + 8 s^2 b h)      W           L 24 s b h^2
                                            two calls   I + B

    I keeps gradients of 11 s b h elements a layer: of two norms, q, k, v, o, up and down.

    rows: b. config: whose attention is explicit, as torch counts none in a CPU's fused kernel.

    >>> cost = split_backward_cost()
    >>> [round(cost.flops[kind] / cost.flops["F"], 3) for kind in ("B", "I", "W", "two calls")]
    [2.0, 1.077, 0.923, 3.077]
    >>> cost.gradient_bytes == 8 * 11 * (16 * 2 * 32) * 8  # L x 11 s b h x 8 bytes
    True
    """
    stage = nn.Sequential(*GPT(config).double().blocks)
    x = torch.randn(rows, config.sequence, config.hidden, dtype=torch.float64)
    flops = {}

    def count(kind, function, *args):
        with FlopCounterMode(display=False) as counter:
            result = function(*args)
        flops[kind] = counter.get_total_flops()
        return result

    def two_calls(held, slope):
        of_input = torch.autograd.grad([held.end], [held.x], [slope], retain_graph=True)
        return of_input, torch.autograd.grad([held.end], list(stage.parameters()), [slope])

    kept = KeptBytes(stage.parameters())
    with kept:
        output, held = count("F", stages.forward, stage, x)
    kept_bytes, slope = kept.now, torch.ones_like(output)
    _, gradients = count("I", stages.input_gradient, held, slope)
    count("W", stages.weight_gradient, held, gradients)
    count("B", stages.backward, stages.forward(stage, x)[1], slope)
    count("two calls", two_calls, stages.forward(stage, x)[1], slope)
    return SplitCost(flops, kept_bytes, sum(gradient.nbytes for gradient in gradients))
