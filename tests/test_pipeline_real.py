"""Pipelines on real ranks: the uncut model's loss and gradients, simulated peaks, counted bytes."""

from dataclasses import replace
from functools import cache, partial

import numpy as np
import pytest
import torch
from torch import nn

import parlab as pl
from parlab.distributed.counting import CollectiveCounter
from parlab.distributed.gpt import GPT, token_batch, token_loss
from parlab.distributed.launch import run_ranks
from parlab.distributed.pipeline import (
    DEEP,
    Sent,
    Step,
    largest_difference,
    measured_timeline,
    pipeline_step,
    whole_step,
)
from parlab.distributed.pipeline_facts import naive_two_stages, split_backward_cost, torch_step
from parlab.distributed.pipeline_rank import KeptBytes
from parlab.distributed.saved import measure
from parlab.distributed.stages import cut
from parlab.distributed.torch_schedules import torch_schedule
from parlab.pipeline.schedules import Schedule, loop

# Of absolute differences in float64. The loss is about 4 and its last digit 9e-16; gradients stay
# below 1, and are sums over at most 256 tokens that add up in another order.
TOLERANCE = 1e-14
TIED = replace(DEEP, tied=True)
TOKENS_BYTES = 16 * 32 * 8  # s h x 8 bytes: what one row of the batch is between stages

MAKE = {
    "GPipe": pl.gpipe,
    "1F1B": pl.one_f_one_b,
    "interleaved": lambda p, m: pl.interleaved_1f1b(p, m, 2),
    "ZB-H1": pl.zero_bubble_h1,
    "ZB-H2": pl.zero_bubble_h2,
    "ZB-V": pl.zero_bubble_v,
}
MICRO_BATCHES = {2: (1, 3), 3: (2, 4), 4: (3, 8)}  # by p: fewer than p, no multiple of p
CASES = [(name, p, m) for p, sizes in MICRO_BATCHES.items() for m in sizes for name in MAKE]
every_case = pytest.mark.parametrize("name, p, m", CASES)


def run_all(schedules, rows_of_a_micro_batch=2, **options):
    return [
        pipeline_step(schedule, rows_of_a_micro_batch * schedule.m, **options)
        for schedule in schedules
    ]


@cache
def runs(p):
    """All cases with p ranks in one launch: {(name, m): (schedule, steps)}."""
    keys = [(name, m) for m in MICRO_BATCHES[p] for name in MAKE]
    schedules = [MAKE[name](p, m) for name, m in keys]
    steps = zip(*run_ranks(partial(run_all, schedules), p), strict=True)
    return dict(zip(keys, zip(schedules, steps, strict=True), strict=True))


@cache
def whole(rows, config=DEEP):
    return whole_step(rows, config=config)


class WithLoss(nn.Module):
    def __init__(self, stage, targets):
        super().__init__()
        self.stage, self.targets = stage, targets

    def forward(self, x):
        return token_loss(self.stage(x), self.targets, "sum") / 100


@cache
def kept_bytes(stages, rows=2):
    """What autograd keeps of one micro-batch in each stage, measured stage by stage."""
    x, targets = token_batch(DEEP, rows)
    measured = []
    for stage in cut(GPT(DEEP).double(), stages):
        run = WithLoss(stage, targets.clone()) if stage.last else stage
        measured.append(measure(run, x.clone()).total)
        x = stage(x).detach()
    return measured


@every_case
def test_loss_and_every_gradient_are_the_uncut_models(name, p, m):
    _, steps = runs(p)[name, m]
    assert largest_difference(steps, whole(2 * m)) <= TOLERANCE


@every_case
def test_ranks_hold_as_many_passes_as_simulated(name, p, m):
    schedule, steps = runs(p)[name, m]
    assert [step.peak_in_flight for step in steps] == pl.simulate(schedule).peak_in_flight


@every_case
def test_autograd_keeps_as_many_bytes_as_simulated(name, p, m):
    schedule, steps = runs(p)[name, m]
    peaks = pl.simulate(schedule).peak_bytes(kept_bytes(len(schedule.ranks)))
    assert [step.peak_kept_bytes for step in steps] == peaks


@every_case
def test_every_boundary_between_ranks_carries_b_s_h_both_ways(name, p, m):
    schedule, steps = runs(p)[name, m]
    last = len(schedule.ranks) - 1
    for rank, step in enumerate(steps):
        hops = {(s, s + by) for s in schedule.stages[rank] for by in (1, -1)}
        crossing = {
            (a, b) for a, b in hops if 0 <= b <= last and schedule.ranks[b] != schedule.ranks[a]
        }
        assert step.sent == dict.fromkeys(crossing, Sent(m, m * 2 * TOKENS_BYTES))


@every_case
def test_messages_are_those_of_the_schedule_and_of_the_formula(name, p, m):
    schedule, steps = runs(p)[name, m]
    counted = [
        tuple(
            sum(sent.messages for (a, b), sent in step.sent.items() if b - a == by)
            for by in (1, -1)
        )
        for step in steps
    ]
    assert counted == schedule.messages
    crossings = {"interleaved": 2 * p - 1, "ZB-V": 2 * (p - 1)}.get(name, p - 1)
    assert sum(map(sum, counted)) == 2 * m * crossings


def count_messages(schedule, config):
    with CollectiveCounter() as counter:
        step = pipeline_step(schedule, 4, config=config)
    return step, counter.count("send"), counter.bytes("send"), counter.count()


@pytest.mark.parametrize("config, swaps", [(DEEP, 0), (TIED, 1)], ids=["untied", "tied"])
def test_nothing_else_is_sent(config, swaps):
    run = partial(count_messages, pl.interleaved_1f1b(2, 4, 2), config)
    for step, messages, sent_bytes, calls in run_ranks(run, 2):
        assert messages == sum(sent.messages for sent in step.sent.values()) + swaps
        table = 64 * 32 * 8
        assert sent_bytes == sum(sent.bytes for sent in step.sent.values()) + swaps * table
        assert calls == messages + 1  # the barrier


@pytest.mark.parametrize("p", [1, 2, 3])
def test_a_tied_head_and_the_embedding_get_the_sum_of_both_gradients(p):
    schedules = [MAKE[name](p, 2) for name in ("1F1B", "ZB-V")]
    for steps in zip(*run_ranks(partial(run_all, schedules, config=TIED), p), strict=True):
        assert largest_difference(steps, whole(4, TIED)) <= TOLERANCE
        gradients = {name: value for step in steps for name, value in step.gradients.items()}
        assert np.array_equal(gradients["head.weight"], gradients["tokens.weight"])
        untied = whole(4).gradients
        expected = untied["head.weight"] + untied["tokens.weight"]
        assert np.abs(expected - gradients["head.weight"]).max() > 1e-3  # other weights, other sum


BY_HAND = {
    "the later micro-batch first": ["F2 F1 B1 B2", "F1 F2 B1 B2"],
    "halves of backward and whole ones": ["F1 F2 F3 B2 I1 B3 W1", "F1 F2 F3 I2 B1 B3 W2"],
    "naive": ["F1 B1 F2 B2", "F1 B1 F2 B2"],
    "receives in another order than sends": ["F1 F2 F3 B1 B2 B3", "F3 F1 B1 B3 F2 B2"],
}


@cache
def by_hand_runs():
    schedules = [pl.schedule_by_hand(rows, name=name) for name, rows in BY_HAND.items()]
    steps = zip(*run_ranks(partial(run_all, schedules), 2), strict=True)
    return dict(zip(BY_HAND, zip(schedules, steps, strict=True), strict=True))


@pytest.mark.parametrize("name", BY_HAND)
def test_a_schedule_by_hand_runs_in_its_own_order(name):
    schedule, steps = by_hand_runs()[name]
    assert largest_difference(steps, whole(2 * schedule.m)) <= TOLERANCE
    assert [step.peak_in_flight for step in steps] == pl.simulate(schedule).peak_in_flight


def test_torchs_own_order_runs_here_too():
    schedule = torch_schedule("InterleavedZeroBubble", 2, 4, 2)
    steps = run_ranks(pipeline_step, 2, args=(schedule, 4))
    assert largest_difference(steps, whole(4)) <= TOLERANCE


@pytest.mark.parametrize("name", ["1F1B", "ZB-H1"])
def test_the_same_micro_batches_in_the_same_order_give_the_same_bits(name):
    (alone,) = run_ranks(whole_step, 1, args=(8, 4))  # with one thread, as the ranks have
    steps = run_ranks(pipeline_step, 2, args=(MAKE[name](2, 4), 8))
    assert largest_difference(steps, alone) == 0


def test_float32_is_close_as_well():
    run = partial(pipeline_step, dtype="float32")
    steps = run_ranks(run, 2, args=(pl.one_f_one_b(2, 2), 2))
    assert all(gradient.dtype == np.float32 for gradient in steps[0].gradients.values())
    assert 0 < largest_difference(steps, whole(2)) < 1e-5  # 24 bits, through 8 layers


def test_a_wrong_gradient_or_a_lost_parameter_shows():
    steps = runs(2)["1F1B", 3][1]
    name, gradient = next(iter(steps[0].gradients.items()))
    for wrong in (gradient + 1e-9, gradient * np.nan):
        bad = replace(steps[0], gradients=steps[0].gradients | {name: wrong})
        assert not largest_difference([bad, steps[1]], whole(6)) <= TOLERANCE
    for few in (steps[1:], [*steps, steps[0]]):
        with pytest.raises(ValueError, match="steps must hold every parameter once, not so"):
            largest_difference(few, whole(6))


def paced(schedule, rows, pace):
    return pipeline_step(schedule, rows, pace=pace)


@cache
def paced_run(name):
    schedule = MAKE[name](4, 8)
    halves = {"input_gradient": 0.004, "weight_gradient": 0.002}
    pace = pl.simulate(schedule, [0.002, 0.002, 0.005, 0.002], **halves)
    steps = run_ranks(paced, 4, args=(schedule, 8, pace))
    return pace, measured_timeline(schedule, steps), largest_difference(steps, whole(8))


PACED = pytest.mark.parametrize("name", ["1F1B", "ZB-V"])


@PACED
def test_a_paced_action_takes_at_least_its_time_and_still_computes(name):
    pace, real, difference = paced_run(name)
    assert difference <= TOLERANCE
    for rank, row in enumerate(pace.schedule.actions):
        for n, action in enumerate(row):
            least = pace.times[action.kind][pace.schedule.stage(rank, action.chunk)]
            assert real.ends[rank][n] - real.starts[rank][n] >= least - 1e-9


@PACED
def test_a_real_step_keeps_to_its_order_and_inputs_and_is_never_faster_than_simulated(name):
    pace, real, _ = paced_run(name)
    schedule, ends = real.schedule, {}
    for rank, row in enumerate(schedule.actions):
        assert all(a <= b for a, b in zip(real.ends[rank], real.starts[rank][1:], strict=False))
        for n, (kind, i, chunk) in enumerate(row):
            stage = schedule.stage(rank, chunk)
            ends["B" if kind == "I" else kind, stage, i] = real.ends[rank][n]
    last = len(schedule.ranks) - 1
    for rank, row in enumerate(schedule.actions):
        for n, (kind, i, chunk) in enumerate(row):
            stage = schedule.stage(rank, chunk)
            before = ("F", stage - 1) if kind == "F" else ("B", stage + 1)
            before = ("F", stage) if kind in "BI" and stage == last else before
            if kind != "W" and before[1] >= 0:
                assert ends[*before, i] <= real.starts[rank][n]
    assert min(row[0] for row in real.starts) == 0
    assert real.makespan >= pace.makespan
    assert 0 <= real.bubble("span") <= real.bubble("total") < 1


def test_a_timeline_of_known_moments_is_the_simulated_one():
    for schedule, times in (
        (pl.one_f_one_b(3, 4), {"forward": [1, 2, 3], "backward": [2, 4, 8]}),
        (pl.zero_bubble_v(2, 3), {"input_gradient": 2, "weight_gradient": 3}),
    ):
        simulated = pl.simulate(schedule, **times)
        steps = [
            Step(None, {}, {}, 0, 0, *(tuple(256 + t for t in row) for row in (starts, ends)))
            for starts, ends in zip(simulated.starts, simulated.ends, strict=True)
        ]
        real = measured_timeline(schedule, steps)
        assert (real.starts, real.ends) == (simulated.starts, simulated.ends)
        assert real.times == simulated.times  # exact: small whole numbers
        for of in ("total", "ideal", "span"):
            assert real.bubble(of) == simulated.bubble(of)
        with pytest.raises(ValueError, match="steps must be one for each of the"):
            measured_timeline(schedule, steps[1:])


@cache
def torch_runs():
    def run():
        sizes = (("GPipe", 1), ("1F1B", 1), ("Interleaved1F1B", 2))
        return [torch_step(name, 8, 8, chunks) for name, chunks in sizes]

    return dict(
        zip(("GPipe", "1F1B", "interleaved"), zip(*run_ranks(run, 4), strict=True), strict=True)
    )


@pytest.mark.parametrize(
    "name, peaks",
    [("GPipe", [8, 8, 8, 8]), ("1F1B", [4, 3, 2, 1]), ("interleaved", [11, 9, 7, 5])],
)
def test_torchs_pipeline_agrees_with_ours(name, peaks):
    steps = torch_runs()[name]
    assert largest_difference(steps, whole(8)) <= TOLERANCE
    assert [step.peak_in_flight for step in steps] == peaks
    assert [step.peak_in_flight for step in runs(4)[name, 8][1]] == peaks


def test_the_naive_split_is_right_and_idles_half_of_the_time():
    assert largest_difference(run_ranks(naive_two_stages, 2), whole(8)) <= TOLERANCE
    steps = run_ranks(pipeline_step, 2, args=(pl.gpipe(2, 1), 8))
    assert measured_timeline(pl.gpipe(2, 1), steps).idle_fraction >= 0.5


def test_two_halves_of_backward_compute_what_the_whole_one_does():
    rows, config = 3, replace(DEEP, layers=2, sequence=8, attention="explicit")
    cost = split_backward_cost(rows, config)
    s, h = 8, 32
    linear, attention = 2 * 24 * s * rows * h**2, 2 * 4 * s**2 * rows * h
    assert cost.flops == {
        "F": linear + attention,
        "I": linear + 2 * attention,
        "W": linear,
        "B": 2 * (linear + attention),
        "two calls": 3 * linear + 4 * attention,
    }
    assert cost.gradient_bytes == 2 * 11 * s * rows * h * 8


def test_kept_bytes_count_a_storage_once_and_let_go_of_it():
    layer = nn.Linear(4, 4)
    kept = KeptBytes(layer.parameters())
    with kept:
        x = torch.ones(2, 4, requires_grad=True)
        y = layer(x)  # keeps x
        z = y.exp() + y.softmax(-1) * x  # keep two outputs, and x again
    assert kept.now == kept.peak == 3 * 2 * 4 * 4  # x once, and two outputs
    del y, z
    assert (kept.now, kept.peak) == (0, 96)


def refusals():
    good = pl.gpipe(2, 2)
    deadlock = Schedule("stuck", 2, loop(2), [["F1", "B1", "F2", "B2"], ["F2", "F1", "B1", "B2"]])
    calls = {
        "no schedule": partial(pipeline_step, "gpipe", 4),
        "ranks": partial(pipeline_step, pl.gpipe(3, 2), 4),
        "rows": partial(pipeline_step, good, 3),
        "no rows": partial(pipeline_step, good, 0),
        "layers": partial(pipeline_step, pl.interleaved_1f1b(2, 2, 5), 4),
        "dropout": partial(pipeline_step, good, 4, config=replace(DEEP, dropout=0.1)),
        "dtype": partial(pipeline_step, good, 4, dtype="float16"),
        "pace": partial(pipeline_step, good, 4, pace=1.0),
        "another pace": partial(pipeline_step, good, 4, pace=pl.simulate(pl.gpipe(3, 2))),
        "deadlock": partial(pipeline_step, deadlock, 4),
        "torch's rows": partial(torch_step, "GPipe", 3, 2),
        "torch's head": partial(torch_step, "GPipe", 4, 2, config=TIED),
    }
    messages = {}
    for name, call in calls.items():
        try:
            call()
        except (ValueError, TypeError) as error:
            messages[name] = str(error)
    return messages


def test_what_cannot_run_is_refused_on_every_rank_before_any_message():
    first, second = run_ranks(refusals, 2, timeout=20)
    assert first == second
    expected = {
        "no schedule": "schedule must be a Schedule, got 'gpipe'",
        "ranks": "schedule must be for the 2 ranks that run, got one for 3",
        "rows": "rows must be a multiple of the 2 micro-batches, got 3",
        "no rows": "rows must be an int of at least 1, got 0",
        "layers": "layers must be at least the number of stages, ranks x chunks = 10, got 8",
        "dropout": "config.dropout must be 0, got 0.1",
        "dtype": "dtype must be one of float64, float32, got 'float16'",
        "pace": "pace must be a Timeline or None, got 1.0",
        "another pace": "pace must be a Timeline of this schedule",
        "deadlock": "the schedule is a deadlock: rank 0 waits at position 1 with B1",
        "torch's rows": "rows must be a multiple of the 2 micro-batches, got 3",
        "torch's head": "config.tied must be False",
    }
    assert first.keys() == expected.keys()
    for name, message in expected.items():
        assert first[name].startswith(message), name
