"""Any pipeline schedule on real ranks: each runs its list of actions and sends what others need.

    steps = run_ranks(pipeline_step, 4, args=(one_f_one_b(4, 8), 8))

`pipeline_step` is called by every rank alike, inside `run_ranks`. It is one forward and backward
pass of a small GPT over the whole batch; its loss and gradients must equal those of `whole_step`.
"""

from collections import Counter
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from parlab.distributed import stages
from parlab.distributed.gpt import GPT, GPTConfig, token_batch, token_loss
from parlab.distributed.pipeline_rank import Rank
from parlab.pipeline.schedules import Schedule
from parlab.pipeline.timeline import Timeline, simulate
from parlab.units import require_choice, require_int

DEEP = GPTConfig(vocab=64, layers=8, hidden=32, heads=4, sequence=16, tied=False)


class Sent(NamedTuple):
    """Messages from one stage to another, and the bytes of all of them."""

    messages: int
    bytes: int


@dataclass(frozen=True)
class Step:
    """What a step left on one rank.

    loss: of the whole batch; None without the last stage.
    gradients: of the parameters of this rank's stages, by their names in the whole model.
    sent: {(from stage, to stage): Sent} to other ranks. The gradient of a tied head is not in it.
    peak_in_flight: most forward passes whose graphs the rank held at once.
    peak_kept_bytes: most bytes that autograd kept for backward at once, parameters left out.
    starts, ends: seconds of each action in the schedule's list, on the clock that all processes of
        a machine share.
    """

    loss: float | None
    gradients: dict[str, np.ndarray]
    sent: dict[tuple[int, int], Sent]
    peak_in_flight: int
    peak_kept_bytes: int
    starts: tuple[float, ...]
    ends: tuple[float, ...]


class Result(NamedTuple):
    """The fields of `Step` that a run without a schedule has as well."""

    loss: float | None
    gradients: dict[str, np.ndarray]


def pipeline_step(schedule, rows, *, config=DEEP, dtype="float64", seed=0, pace=None):
    """Run one step of a small GPT under a pipeline schedule, and return this rank's `Step`.

    The loss is the mean over all tokens of the batch. Where head and embedding are tied, the last
    stage has a copy of the table; after the step its rank and that of the first stage swap their
    gradients, and both have the sum.

    Parameters
    ----------
    schedule : a Schedule for as many ranks as call this, from `parlab.pipeline` or by hand.
    rows : sequences in the batch; m must divide them.
    config : a `GPTConfig` without dropout and with a layer for every stage.
    dtype : "float64" or "float32".
    seed : of weights and batch.
    pace : None, or a Timeline of this schedule: an action that has computed then sleeps until it
        has taken as long as there. A synthetic load: messages and their order are real, but as
        sleeping needs no core, the times are those of a processor for each rank, on any machine
        that computes well within the pace.

    Raises ValueError or TypeError on every rank, before any message.

    >>> from parlab.distributed.launch import run_ranks
    >>> from parlab.pipeline.schedules import one_f_one_b
    >>> steps = run_ranks(pipeline_step, 4, args=(one_f_one_b(4, 8), 8))
    >>> largest_difference(steps, whole_step(8)) < 1e-14
    True
    >>> [step.peak_in_flight for step in steps]
    [4, 3, 2, 1]
    >>> steps[1].sent[1, 2], steps[1].sent[1, 0]  # m messages of b s h = 1 x 16 x 32 float64
    (Sent(messages=8, bytes=32768), Sent(messages=8, bytes=32768))
    """
    _check(schedule, rows, pace)
    model, tokens, targets = model_and_batch(rows, config, dtype, seed)
    parts = stages.cut(model, len(schedule.ranks))
    mine = [parts[stage] for stage in schedule.stages[dist.get_rank()]]
    tokens, m_targets = (_micro_batches(part, schedule.m) for part in (tokens, targets))
    losses = [partial(_share_of_loss, part, targets.numel()) for part in m_targets]
    boundary = torch.empty(*tokens[0].shape, config.hidden, dtype=model.norm.weight.dtype)
    rank = Rank(schedule, mine, tokens, losses, boundary, pace)
    rank.run()
    if config.tied:
        _sum_tied(schedule, mine)
    return Step(
        loss=rank.loss,
        gradients=gradients_of(*mine),
        sent={hop: Sent(len(sizes), sum(sizes)) for hop, sizes in rank.sent.items()},
        peak_in_flight=rank.peak,
        peak_kept_bytes=rank.kept.peak,
        starts=tuple(rank.starts),
        ends=tuple(rank.ends),
    )


def _check(schedule, rows, pace):
    if not isinstance(schedule, Schedule):
        raise TypeError(f"schedule must be a Schedule, got {schedule!r:.60}: gpipe(4, 8) makes one")
    if schedule.p != dist.get_world_size():
        raise ValueError(
            f"schedule must be for the {dist.get_world_size()} ranks that run, got one for "
            f"{schedule.p}"
        )
    require_micro_batches(rows, schedule.m)
    if pace is not None and not isinstance(pace, Timeline):
        raise TypeError(f"pace must be a Timeline or None, got {pace!r:.60}: simulate makes one")
    if pace is not None and pace.schedule.stages != schedule.stages:
        raise ValueError("pace must be a Timeline of this schedule, got one with other stages")
    simulate(schedule)  # a deadlock is named here, before anyone waits in it


def require_micro_batches(rows, m):
    """Raise ValueError unless m micro-batches of equal size make up the rows."""
    if require_int("rows", rows, minimum=1) % m:
        raise ValueError(
            f"rows must be a multiple of the {m} micro-batches, got {rows}: all are equally large"
        )


def model_and_batch(rows, config, dtype, seed):
    """A GPT, its tokens and its targets, by the parameters of `pipeline_step`."""
    if config.dropout:
        raise ValueError(
            f"config.dropout must be 0, got {config.dropout}: micro-batches would draw other masks "
            "than the whole batch"
        )
    dtype = getattr(torch, require_choice("dtype", dtype, ("float64", "float32")))
    return GPT(config, seed).to(dtype), *token_batch(config, rows, seed)


def _micro_batches(tensor, m):
    """Equal parts, each with memory of its own, so that kept bytes tell them apart."""
    return [part.clone() for part in tensor.chunk(m)]


def _share_of_loss(targets, count, logits):
    return token_loss(logits, targets, "sum") / count


def _sum_tied(schedule, parts):
    """Give every copy of a tied table the sum of both copies' gradients."""
    tables = [stage.tokens.weight for stage in parts if stage.first]
    tables += [stage.head.weight for stage in parts if stage.last]
    if len(tables) == 1:
        mine, (first, *_, last) = tables[0].grad, schedule.ranks
        peer = last if dist.get_rank() == first else first
        other = torch.empty_like(mine)
        work = dist.isend(mine, peer)
        dist.recv(other, peer)
        work.wait()
        tables[0].grad = mine + other
    elif tables:
        tables[0].grad = tables[1].grad = tables[0].grad + tables[1].grad


def whole_step(rows, micro_batches=1, *, config=DEEP, dtype="float64", seed=0):
    """The same step of the uncut model in this process: what every pipeline must equal.

    micro_batches: backward passes, one after the other, whose gradients add up.

    >>> round(whole_step(8).loss, 3)  # a new model guesses: ln 64 = 4.159
    4.173
    """
    m = require_int("micro_batches", micro_batches, minimum=1, maximum=rows)
    model, tokens, targets = model_and_batch(rows, config, dtype, seed)
    loss = 0
    for part, wanted in zip(tokens.tensor_split(m), targets.tensor_split(m), strict=True):
        share = _share_of_loss(wanted, targets.numel(), model(part))
        share.backward()
        loss += share.item()
    return Result(loss, gradients_of(model))


def gradients_of(*modules):
    """The gradient of every parameter by its name; a tied head has its own name as well."""
    return {
        name: weight.grad.numpy()
        for module in modules
        for name, weight in module.named_parameters(remove_duplicate=False)
    }


def largest_difference(steps, whole):
    """Largest absolute difference of the loss and of any gradient from the uncut model's.

    steps: of all ranks. Raises ValueError if a parameter is on no rank or on two.
    """
    found = [name for step in steps for name in step.gradients]
    if sorted(found) != sorted(whole.gradients):
        odd = set(found) ^ set(whole.gradients) or {n for n in found if found.count(n) > 1}
        raise ValueError(f"steps must hold every parameter once, not so {sorted(odd)[:5]}")
    (loss,) = [step.loss for step in steps if step.loss is not None]
    off = [
        np.abs(gradient - whole.gradients[name]).max()
        for step in steps
        for name, gradient in step.gradients.items()
    ]
    return float(np.max([abs(loss - whole.loss), *off]))  # NaN if one of them is


def measured_timeline(schedule, steps):
    """The Timeline of a real step: like that of `simulate`, with the starts and ends of its ranks.

    Its `times` are means over the micro-batches. Simulated with them, the schedule says how long
    the step takes without messages and delays. Without I and W each counts as half of B.

    steps: of all ranks, in order. Raises ValueError for steps of another schedule.
    """
    rows = schedule.actions
    if [len(step.starts) for step in steps] != [len(row) for row in rows]:
        raise ValueError(
            f"steps must be one for each of the {schedule.p} ranks of {schedule.name}, with a "
            "start for each of its actions"
        )
    first = min(step.starts[0] for step in steps)
    starts, ends = (
        tuple(tuple(moment - first for moment in moments) for moments in all_moments)
        for all_moments in zip(*((step.starts, step.ends) for step in steps), strict=True)
    )
    return Timeline(schedule, _mean_times(schedule, starts, ends), starts, ends)


def _mean_times(schedule, starts, ends):
    spent, number = Counter(), Counter()
    for rank, row in enumerate(schedule.actions):
        for action, start, end in zip(row, starts[rank], ends[rank], strict=True):
            key = action.kind, schedule.stage(rank, action.chunk)
            spent[key] += end - start
            number[key] += 1
    times = {kind: [] for kind in "FBIW"}
    for stage in range(len(schedule.ranks)):
        backward = sum(spent[kind, stage] for kind in "BIW") / schedule.m
        times["F"].append(spent["F", stage] / schedule.m)
        times["B"].append(backward)
        for kind in "IW":
            n = number[kind, stage]
            times[kind].append(spent[kind, stage] / n if n else backward / 2)
    return {kind: tuple(seconds) for kind, seconds in times.items()}
