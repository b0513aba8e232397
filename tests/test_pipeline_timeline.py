"""Times of actions against longest paths, grids and tables as printed, and closed forms."""

import tracemalloc
from fractions import Fraction
from graphlib import CycleError
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import parlab as pl
from parlab.pipeline.bubble import SCHEDULES
from parlab.pipeline.schedules import Schedule
from parlab.pipeline.timeline import Placed
from tests import pipeline_reference as reference

GENERATORS = {
    "GPipe": pl.gpipe,
    "1F1B": pl.one_f_one_b,
    "interleaved 1F1B": pl.interleaved_1f1b,
    "ZB-H1": pl.zero_bubble_h1,
    "ZB-H2": pl.zero_bubble_h2,
    "ZB-V": pl.zero_bubble_v,
}


def generate(name, p, m, v=2):
    return GENERATORS[name](p, m, *[v] * (name == "interleaved 1F1B"))


# As printed.

GPIPE_4_4 = """
time     0   1   2   3   4   5   6   7   8   9   10  11  12  13
stage 0  F1  F2  F3  F4  .   .   .   .   .   .   B4  B3  B2  B1
stage 1  .   F1  F2  F3  F4  .   .   .   .   B4  B3  B2  B1  .
stage 2  .   .   F1  F2  F3  F4  .   .   B4  B3  B2  B1  .   .
stage 3  .   .   .   F1  F2  F3  F4  B4  B3  B2  B1  .   .   .
"""

# Idle fractions in percent as a course prints them: m = 1, 4, 8, 16, 32, 64.
PRINTED = {
    2: ["50", "20", "11.1", "5.9", "3.0", "1.5"],
    4: ["75", "42.9", "27.3", "15.8", "8.6", "4.5"],
    8: ["87.5", "63.6", "46.7", "30.4", "18.0", "9.9"],
}


def test_the_printed_gpipe_grid_cell_for_cell():
    # Stage r is on rank r, so that only the word at the start of a row differs.
    grid = pl.text_grid(pl.simulate(pl.gpipe(4, 4)))
    printed = [line.replace("stage", "rank").split() for line in GPIPE_4_4.strip().splitlines()]
    assert [line.split() for line in grid.splitlines()] == printed


def test_the_printed_table_of_idle_fractions_has_one_wrong_digit():
    wrong = {}
    for p, row in PRINTED.items():
        for m, printed in zip((1, 4, 8, 16, 32, 64), row, strict=True):
            decimals = len(printed.partition(".")[2])
            formula = pl.pipeline_bubble(p, m)
            for schedule in (pl.gpipe(p, m), pl.one_f_one_b(p, m)):
                assert pl.simulate(schedule).idle_fraction == formula
            if f"{100 * formula:.{decimals}f}" != printed:
                wrong[p, m] = printed, f"{100 * formula:.1f}"
    assert wrong == {(8, 32): ("18.0", "17.9")}
    assert pl.pipeline_bubble(8, 32) == 7 / 39


@pytest.mark.parametrize(
    "p, m, fraction",
    [
        (4, 1, Fraction(3, 4)),
        (4, 29, Fraction(3, 32)),
        (4, 4, Fraction(3, 7)),
        (8, 4, Fraction(7, 11)),
        (4, 8, Fraction(3, 11)),
        (8, 16, Fraction(7, 23)),
        (16, 8, Fraction(15, 23)),
        (1, 5, Fraction(0)),
    ],
    ids=str,
)
def test_bubble_of_total_as_printed_with_its_arguments_in_order(p, m, fraction):
    assert pl.pipeline_bubble(p, m) == float(fraction)
    assert pl.simulate(pl.gpipe(p, m), 1, 2).idle_fraction == float(fraction)


def test_conventions_differ_and_only_of_total_stays_below_1():
    assert round(100 * pl.pipeline_bubble(8, 64), 2) == 9.86
    assert round(100 * pl.pipeline_bubble(8, 64, of="ideal"), 1) == 10.9
    assert pl.pipeline_bubble(16, 8, of="ideal") == 15 / 8
    assert pl.pipeline_bubble(4, 29, of="ideal") == 3 / 29


@pytest.mark.parametrize(
    "p, m, v, fraction", [(4, 10, 2, Fraction(3, 20)), (4, 3, 2, Fraction(2, 3))], ids=str
)
def test_interleaved_of_other_than_multiples_of_p_pippy_pr_1048(p, m, v, fraction):
    assert pl.pipeline_bubble(p, m, v, of="ideal") == float(fraction)
    assert pl.simulate(pl.interleaved_1f1b(p, m, v), 1, 2).bubble("ideal") == float(fraction)


def test_idle_fractions_recorded_from_torchs_schedules():
    # p = 4, m = 8, F = 1, B = 2, I = W = 1.
    assert pl.simulate(pl.interleaved_1f1b(4, 8, 2), 1, 2).idle_fraction == 3 / 19
    assert pl.simulate(pl.interleaved_1f1b(4, 8, 4), 1, 2).idle_fraction == 3 / 35
    assert round(pl.simulate(pl.zero_bubble_v(4, 8), 1, 2).idle_fraction, 4) == 0.0588


# Formula = simulation.


@pytest.mark.parametrize(
    "name, v", [("GPipe", 1), ("1F1B", 1), *(("interleaved 1F1B", v) for v in (1, 2, 3, 5))]
)
def test_the_fractions_hold_for_all_p_m_and_v(name, v):
    for p, m, times in product(range(1, 8), range(1, 16), ((1, 2), (3, 1), (2, 5))):
        timeline = pl.simulate(generate(name, p, m, v), *times)
        for of in ("total", "ideal", "span"):
            assert timeline.bubble(of) == pl.pipeline_bubble(p, m, v, of=of), (p, m, times, of)


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_seconds_hold_wherever_their_assumption_does(name):
    held = 0
    for p, m in product(range(1, 7), range(1, 14)):
        for f, i, w in product((1, 2, 3), repeat=3):
            v = {"interleaved 1F1B": 3, "ZB-V": 2}.get(name, 1)
            halves = {"input_gradient": i, "weight_gradient": w}
            sizes = {"chunks": v, **halves}
            try:
                total = pl.pipeline_bubble_seconds(name, p, m, f, **sizes)
                span = pl.pipeline_bubble_seconds(name, p, m, f, **sizes, of="span")
            except ValueError:
                continue
            timeline = pl.simulate(generate(name, p, m, v), f, **halves)
            assert max(timeline.idle) == min(timeline.idle) == total, (p, m, f, i, w)
            assert max(timeline.idle_in_span) == span, (p, m, f, i, w)
            assert timeline.makespan == m * v * (f + i + w) + total
            held += 1
    assert held > (50 if name == "ZB-V" else 500)


@pytest.mark.parametrize("p", range(1, 9))
def test_zero_bubble_ends_at_3_m_plus_p_less_1(p):
    for m in range(1, 20):
        h1, h2 = (pl.simulate(make(p, m), 1, 2) for make in (pl.zero_bubble_h1, pl.zero_bubble_h2))
        assert (h1.makespan == 3 * m + p - 1) == (m >= p)
        if m >= 2 * p - 1:
            assert h2.makespan == 3 * m + p - 1
            assert pl.simulate(pl.zero_bubble_v(p, m), 1, 2).makespan == 6 * m + p - 1


@pytest.mark.parametrize("make", [pl.zero_bubble_h2, pl.zero_bubble_v], ids=["H2", "V"])
@pytest.mark.parametrize("p", range(2, 8))
def test_zero_bubble_reaches_zero_within_each_span_from_2_p_less_1_on(make, p):
    for m in range(1, 20):
        timeline = pl.simulate(make(p, m), 1, 2)
        assert (timeline.bubble("span") == 0) == (m >= 2 * p - 1)
        assert timeline.bubble("total") > 0  # the pipeline still fills and drains


def test_table_1_of_qi_et_al_2401_10241_and_dualpipes_letters():
    # F = I = W = 1 and p = 8. DualPipe's table writes B for the full backward pass: F + B - 2W.
    def seconds(name, m=15):
        halves = {"input_gradient": 1, "weight_gradient": 1}
        return pl.pipeline_bubble_seconds(name, 8, m, 1, of="span", **halves)

    f, whole, w = 1, 2, 1
    assert seconds("1F1B") == 7 * (f + whole) == 21
    assert seconds("ZB-H1") == 7 * (f + whole - 2 * w) == 7 == seconds("1F1B") / 3
    assert seconds("ZB-H2") == 0
    for name in ("1F1B", "ZB-H1", "ZB-H2"):
        assert max(pl.simulate(generate(name, 8, 15), 1, 2).idle_in_span) == seconds(name)


def test_unequal_stages_have_gpipes_known_makespan():
    # Two flow shops: all forward passes, then all backward ones, each limited by its slowest stage.
    for forward, backward in (([1, 3, 2], [2, 2, 5]), ([4, 1, 1], [1, 9, 1]), ([7, 1], [1, 2])):
        for m in range(1, 7):
            timeline = pl.simulate(pl.gpipe(len(forward), m), forward, backward)
            fill = sum(forward) + sum(backward)
            assert timeline.makespan == fill + (m - 1) * (max(forward) + max(backward))


def test_with_unequal_stages_gpipe_and_1f1b_no_longer_have_one_bubble():
    times = [1, 1, 1, 3], [2, 2, 2, 1]
    fractions = [
        pl.simulate(make(4, 8), *times).idle_fraction for make in (pl.gpipe, pl.one_f_one_b)
    ]
    assert fractions[0] > fractions[1] + 0.05


def test_a_slow_last_stage_sets_the_pace_of_1f1b():
    slow = [pl.simulate(pl.one_f_one_b(4, m), [1, 1, 1, 2], [2, 2, 2, 4]) for m in (20, 40)]
    assert slow[1].makespan - slow[0].makespan == 20 * 6
    assert slow[1].idle[3] == 3 * (1 + 2)  # it waits only to be reached, and at the end


# Messages.


@pytest.mark.parametrize("p, m, c", [(4, 8, 1), (3, 5, 2.5), (1, 4, 9)])
def test_gpipe_pays_for_a_message_once_a_stage_and_direction(p, m, c):
    timeline = pl.simulate(pl.gpipe(p, m), 1, 2, transfer=c)
    assert timeline.makespan == (m + p - 1) * 3 + 2 * (p - 1) * c


@pytest.mark.parametrize("p, c", [(2, 1), (4, 1), (4, 0.5), (8, 2)])
def test_1f1b_pays_for_messages_at_every_micro_batch(p, c):
    # Rank 0 has p micro-batches under way, and each takes p (F+B) + 2 (p-1) c to come back.
    ends = [pl.simulate(pl.one_f_one_b(p, m), 1, 2, transfer=c).makespan for m in (20 * p, 40 * p)]
    assert (ends[1] - ends[0]) / (20 * p) == pytest.approx(3 + 2 * (p - 1) * c / p, rel=1e-12)


def test_the_turn_of_a_v_needs_no_message():
    # One micro-batch on 2 ranks: 4 stages and one message each way, then the same back.
    timeline = pl.simulate(pl.zero_bubble_v(2, 1), 1, 2, transfer=10)
    ends = dict(zip(timeline.schedule.actions[0], timeline.ends[0], strict=True))
    assert ends["F", 0, 1] == 4 + 2 * 10 and ends["I", 0, 0] == 8 + 4 * 10 + 1  # W of stage 2


def test_chunks_on_one_rank_exchange_nothing():
    one = pl.simulate(pl.interleaved_1f1b(1, 3, 4), transfer=5)
    assert one.makespan == 24 and one.idle == [0]


# Longest paths.


@st.composite
def lawful_schedules(draw):
    """A schedule that can run: its actions are taken at random from those that are ready."""
    p, m, v = draw(st.integers(1, 4)), draw(st.integers(1, 4)), draw(st.integers(1, 3))
    placed = draw(st.permutations(range(p * v)))
    stages = [placed[rank * v : rank * v + v] for rank in range(p)]
    split = draw(st.booleans())
    rows, done = [[] for _ in range(p)], set()
    rank_of = {stage: rank for rank, row in enumerate(stages) for stage in row}
    waiting = set(product("FIW" if split else "FB", range(p * v), range(m)))
    last = p * v - 1
    while waiting:
        ready = sorted(
            (kind, s, i)
            for kind, s, i in waiting
            if (kind == "F" and (s == 0 or ("F", s - 1, i) in done))
            or (kind in "BI" and ((kind, s + 1, i) if s < last else ("F", s, i)) in done)
            or (kind == "W" and ("I", s, i) in done)
        )
        action = kind, stage, i = draw(st.sampled_from(ready))
        rows[rank_of[stage]].append((kind, i, stages[rank_of[stage]].index(stage)))
        done.add(action)
        waiting.remove(action)
    return Schedule("random", m, stages, rows)


TIMES = st.lists(st.integers(0, 9), min_size=12, max_size=12)


@settings(max_examples=60, deadline=None)
@given(lawful_schedules(), TIMES, TIMES, TIMES, st.integers(0, 5))
def test_any_lawful_order_runs_on_its_longest_paths(schedule, forward, inputs, weights, transfer):
    n = len(schedule.ranks)
    f, i, w = ([x + 1 for x in times[:n]] for times in (forward, inputs, weights))
    timeline = pl.simulate(schedule, f, input_gradient=i, weight_gradient=w, transfer=transfer)
    whole = [x + y for x, y in zip(i, w, strict=True)]
    times = {"F": f, "B": whole, "I": i, "W": w}
    ends = reference.ends(schedule, lambda kind, stage: times[kind][stage], transfer)
    assert {(r, n): end for r, row in enumerate(timeline.ends) for n, end in enumerate(row)} == ends
    assert timeline.makespan == max(ends.values())
    for rank, stages in enumerate(schedule.stages):
        work = schedule.m * sum(f[s] + whole[s] for s in stages)
        assert timeline.busy[rank] == work == timeline.makespan - timeline.idle[rank]
    assert 0 <= timeline.bubble("span") <= timeline.bubble("total") < 1


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(sorted(GENERATORS)),
    st.integers(1, 4),
    st.integers(1, 5),
    st.randoms(use_true_random=False),
)
def test_a_shuffled_schedule_runs_if_and_only_if_its_graph_has_no_cycle(name, p, m, random):
    schedule = generate(name, p, m)
    rows = [list(row) for row in schedule.actions]
    row = random.choice(rows)
    one, other = random.randrange(len(row)), random.randrange(len(row))
    row.insert(other, row.pop(one))
    shuffled = Schedule("shuffled", m, schedule.stages, rows)
    try:
        ends = reference.ends(shuffled, lambda kind, stage: 2 if kind == "B" else 1)
    except CycleError:
        with pytest.raises(ValueError, match="deadlock: rank"):
            pl.simulate(shuffled, 1, 2)
    else:
        assert pl.simulate(shuffled, 1, 2).makespan == max(ends.values())


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(sorted(GENERATORS)),
    st.integers(1, 5),
    st.integers(1, 8),
    st.sampled_from(["drop", "repeat"]),
    st.randoms(use_true_random=False),
)
def test_a_dropped_or_repeated_action_never_passes(name, p, m, fault, random):
    schedule = generate(name, p, m)
    rows = [list(row) for row in schedule.actions]
    rank = random.randrange(p)
    at = random.randrange(len(rows[rank]))
    if fault == "drop":
        del rows[rank][at]
    else:
        rows[rank].insert(random.randrange(len(rows[rank])), rows[rank][at])
    with pytest.raises(ValueError, match=f"rank {rank} (must run|runs)"):
        Schedule("faulty", m, schedule.stages, rows)


@given(
    st.sampled_from(sorted(GENERATORS)),
    st.integers(1, 4),
    st.integers(1, 9),
    st.floats(1e-3, 1e3),
    st.floats(1e-3, 1e3),
    st.floats(0, 1e3),
)
@settings(max_examples=60, deadline=None)
def test_fractions_of_any_times_are_no_less_than_0(name, p, m, forward, backward, transfer):
    timeline = pl.simulate(generate(name, p, m), forward, backward, transfer=transfer)
    assert all(idle >= 0 for idle in timeline.idle_in_span + timeline.idle)
    assert 0 <= timeline.bubble("span") <= timeline.idle_fraction < 1
    assert min(timeline.rank_bubbles("ideal")) >= 0
    for starts, ends in zip(timeline.starts, timeline.ends, strict=True):
        assert all(start >= end for start, end in zip(starts[1:], ends, strict=False))


# What a chart asks.


def test_an_action_is_found_by_rank_and_time():
    timeline = pl.simulate(pl.one_f_one_b(4, 8), 1, 2)
    for rank, starts in enumerate(timeline.starts):
        for n, start in enumerate(starts):
            placed = timeline.action_at(rank, start + 0.5)
            assert placed == Placed(
                timeline.schedule.actions[rank][n], n, start, timeline.ends[rank][n]
            )
            assert timeline.action_at(rank, start) == placed  # an end belongs to what starts there
    assert timeline.action_at(3, 2.9) is None  # before its first action
    assert timeline.action_at(0, timeline.makespan) is None
    assert timeline.action_at(1, 10**6) is None


@pytest.mark.parametrize(
    "rank, seconds, error, name",
    [
        (4, 0, ValueError, "rank"),
        (-1, 0, ValueError, "rank"),
        (0.5, 0, TypeError, "rank"),
        (0, -1, ValueError, "seconds"),
        (0, float("nan"), ValueError, "seconds"),
    ],
)
def test_a_place_outside_the_chart_is_named(rank, seconds, error, name):
    with pytest.raises(error, match=f"^{name} must be"):
        pl.simulate(pl.gpipe(4, 4)).action_at(rank, seconds)


def test_idle_time_by_rank_in_all_conventions():
    timeline = pl.simulate(pl.one_f_one_b(4, 8), 1, 2)
    assert timeline.idle == [9] * 4 and timeline.idle_in_span == [9, 6, 3, 0]
    assert timeline.busy == [24] * 4 and timeline.spans == [33, 30, 27, 24]
    assert timeline.rank_bubbles() == [9 / 33] * 4
    assert timeline.rank_bubbles("ideal") == [9 / 24] * 4
    assert timeline.rank_bubbles("span") == [9 / 33, 6 / 30, 3 / 27, 0]
    with pytest.raises(ValueError, match="of must be one of total, ideal, span, got 'all'"):
        timeline.bubble("all")


INTERLEAVED_2_2_2 = """
time    0     1     2     3     4     5     6     7     8     9
rank 0  F1.1  F2.1  F1.2  F2.2  .     B1.2  .     B2.2  B1.1  B2.1
rank 1  .     F1.1  F2.1  F1.2  B1.2  F2.2  B2.2  B1.1  B2.1  .
"""
H1_2_1_IN_HALVES = """
time    0   1   2   3   4   5   6
rank 0  F1  F1  .   .   .   I1  W1
rank 1  .   .   F1  F1  I1  W1  .
"""


def test_grids_of_chunks_and_of_finer_slots():
    assert pl.text_grid(pl.simulate(pl.interleaved_1f1b(2, 2, 2))) == INTERLEAVED_2_2_2.strip()
    halves = pl.text_grid(pl.simulate(pl.zero_bubble_h1(2, 1)), slot=0.5)
    assert halves == H1_2_1_IN_HALVES.strip()


@pytest.mark.parametrize(
    "slot, message",
    [
        (1, "slot must divide all starts and ends, got 1 and an action .* at 4.5"),
        (0, "slot must be a finite number above 0"),
        (1e-9, "slot must leave at most 100000 cells"),
    ],
)
def test_a_slot_that_does_not_fit_is_refused(slot, message):
    with pytest.raises(ValueError, match=message):
        pl.text_grid(pl.simulate(pl.gpipe(2, 3), 1, 0.5), slot)


def test_a_schedule_without_times_has_no_grid():
    with pytest.raises(TypeError, match="timeline must be what simulate returns"):
        pl.text_grid(pl.gpipe(2, 2))


# What a reader gives.


def test_times_by_stage_by_rank_and_as_one_number_agree():
    schedule = pl.interleaved_1f1b(2, 4, 2)
    ends = pl.simulate(schedule, 2, 3).ends
    assert pl.simulate(schedule, [2, 2], (3, 3, 3, 3)).ends == ends
    assert pl.simulate(schedule, np.array([2.0, 2.0]), np.float32(3)).ends == ends
    unequal = pl.simulate(schedule, [1, 2])
    assert unequal.ends == pl.simulate(schedule, [1, 2, 1, 2]).ends  # stages 0 to 3
    v = pl.zero_bubble_v(2, 4)
    assert pl.simulate(v, [1, 2]).ends == pl.simulate(v, [1, 2, 2, 1]).ends


def test_counts_stay_ints_and_inputs_stay_as_they_were():
    times = [1, 2, 3, 4]
    timeline = pl.simulate(pl.one_f_one_b(4, 8), times, times, transfer=0)
    assert type(timeline.makespan) is int and times == [1, 2, 3, 4]


def test_a_whole_backward_takes_what_its_halves_take():
    schedule = pl.one_f_one_b(4, 8)
    assert pl.simulate(schedule, 1, input_gradient=1, weight_gradient=1).makespan == 33
    assert pl.simulate(schedule, 1, 2, input_gradient=0.5, weight_gradient=1.5).makespan == 33
    with pytest.raises(ValueError, match="backward must be the sum of input_gradient and weight"):
        pl.simulate(schedule, 1, 3, input_gradient=1, weight_gradient=1)


@pytest.mark.parametrize(
    "times, error, message",
    [
        ({"forward": -1}, ValueError, "forward must be a finite number of at least 0, got -1"),
        ({"backward": float("nan")}, ValueError, "backward must be a finite number"),
        ({"backward": float("inf")}, ValueError, "backward must be a finite number"),
        ({"transfer": -0.1}, ValueError, "transfer must be a finite number"),
        ({"transfer": float("nan")}, ValueError, "transfer must be a finite number"),
        ({"transfer": [1, 2]}, TypeError, "transfer must be a finite number"),
        ({"transfer": np.ones(4)}, TypeError, "transfer must be one number, got 4"),
        ({"forward": [1, 2, -3, 4]}, ValueError, r"forward\[2\] must be a finite number"),
        ({"forward": [1, 2, 3]}, ValueError, r"forward must be one number, one per rank \(4\)"),
        ({"forward": "fast"}, TypeError, "forward must be a finite number"),
        ({"forward": None}, TypeError, "forward must be a finite number"),
        ({"forward": True}, TypeError, "forward must be a finite number"),
        ({"forward": {0: 1}}, TypeError, "forward must be a finite number"),
        ({"forward": np.ones((4, 4))}, TypeError, r"forward\[0\] must be one number"),
        ({"forward": 1e300}, ValueError, "forward must be at most 1e[+]15"),
        ({"forward": 10**400}, ValueError, "forward must be a finite number"),
        ({"input_gradient": 1}, ValueError, "must be given both or neither"),
        ({"weight_gradient": 1}, ValueError, "must be given both or neither"),
        (
            {"input_gradient": -1, "weight_gradient": 2},
            ValueError,
            "input_gradient must be a finite number",
        ),
        ({"forward": 0, "backward": 0}, ValueError, "of rank 0 must not both be 0"),
        ({"forward": [1, 0, 1, 1], "backward": [1, 0, 1, 1]}, ValueError, "of rank 1 must not"),
    ],
    ids=str,
)
def test_bad_times_are_named(times, error, message):
    with pytest.raises(error, match=message):
        pl.simulate(pl.one_f_one_b(4, 8), **times)


def test_what_is_no_schedule_is_refused():
    with pytest.raises(TypeError, match="schedule must be a Schedule"):
        pl.simulate([["F1", "B1"]])


@pytest.mark.parametrize("name", ["stages", "micro_batches", "chunks"])
@pytest.mark.parametrize(
    "value, error", [(0, ValueError), (-3, ValueError), (2.0, TypeError), (10**12, ValueError)]
)
def test_bad_counts_of_a_formula_are_named(name, value, error):
    sizes = {"stages": 4, "micro_batches": 8, "chunks": 1, name: value}
    with pytest.raises(error, match=f"^{name} must be an int"):
        pl.pipeline_bubble(**sizes)
    with pytest.raises(error, match=f"^{name} must be an int"):
        pl.pipeline_bubble_seconds("1F1B", **sizes)


@pytest.mark.parametrize(
    "arguments, options, message",
    [
        (("ZB-H1", 4, 3), {}, "ZB-H1 must have m >= p"),
        (("ZB-H1", 4, 8, 1, 4), {}, "ZB-H1 must have m >= p and W <= F"),
        (("ZB-H2", 4, 6, 2, 2), {}, "ZB-H2 must have m >= 2 p - 1"),
        (("ZB-V", 4, 8, 1, 1), {"chunks": 2}, "ZB-V must have .* F = I = W"),
        (("ZB-V", 4, 8, 1, 2), {}, "chunks must be 2 for ZB-V, got 1"),
        (("1F1B", 4, 8), {"chunks": 2}, "chunks must be 1 for 1F1B, got 2"),
        (("1F1B", 4, 8), {"of": "ideal"}, "of must be one of total, span"),
        (("DualPipe", 4, 8), {}, "schedule must be one of GPipe, 1F1B"),
        (("1F1B", 4, 8, -1), {}, "forward must be"),
        (("1F1B", 4, 8), {"input_gradient": 1}, "both or neither"),
    ],
    ids=str,
)
def test_a_formula_outside_its_assumption_is_refused(arguments, options, message):
    with pytest.raises(ValueError, match=message):
        pl.pipeline_bubble_seconds(*arguments, **options)


def test_formulas_answer_sizes_that_no_schedule_can_have():
    assert pl.pipeline_bubble(10**9, 10**9) == (10**9 - 1) / (2 * 10**9 - 1)
    with pytest.raises(ValueError, match="of must be one of"):
        pl.pipeline_bubble(4, 8, of="mean")


def test_memory_of_a_timeline_is_linear_and_small():
    # 150 MB for a million actions, beside a Python of 12 MB.
    tracemalloc.start()
    timeline = pl.simulate(pl.one_f_one_b(32, 512), 1.5, 2.5)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak / (2 * 32 * 512) < 130 and timeline.makespan == (512 + 31) * 4


@pytest.mark.parametrize("name", sorted(GENERATORS))
def test_work_grows_linearly_with_micro_batches(name, monkeypatch):
    # Counted, not timed: how often the sweep is woken, which is all that may grow faster.
    from parlab.pipeline import sweep

    def wakes(m):
        count = 0
        run = sweep._run

        def counting(*arguments):
            nonlocal count
            for _ in run(*arguments):
                count += 1
                yield

        with monkeypatch.context() as patch:
            patch.setattr(sweep, "_run", counting)
            pl.simulate(generate(name, 8, m), 1, 2)
        return count

    assert wakes(128) <= 4.2 * wakes(32) + 64
