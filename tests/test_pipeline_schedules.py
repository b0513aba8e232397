"""Orders of actions: complete whatever the sizes, held in memory as published, refused if wrong."""

from collections import Counter
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

import parlab as pl
from parlab.models import ModelConfig
from parlab.pipeline.actions import short_name
from parlab.pipeline.schedules import Schedule

GENERATORS = {
    "GPipe": pl.gpipe,
    "1F1B": pl.one_f_one_b,
    "interleaved, v = 2": lambda p, m: pl.interleaved_1f1b(p, m, 2),
    "interleaved, v = 3": lambda p, m: pl.interleaved_1f1b(p, m, 3),
    "ZB-H1": pl.zero_bubble_h1,
    "ZB-H2": pl.zero_bubble_h2,
    "ZB-V": pl.zero_bubble_v,
}
any_schedule = pytest.mark.parametrize("generate", GENERATORS.values(), ids=GENERATORS)


def texts(schedule):
    return [" ".join(short_name(a, schedule.v) for a in row) for row in schedule.actions]


@any_schedule
def test_every_size_runs_each_pass_once_on_the_rank_that_has_the_stage(generate):
    for p, m in product(range(1, 8), range(1, 16)):
        schedule = generate(p, m)
        assert (schedule.p, schedule.m, len(schedule.actions)) == (p, m, p)
        assert sorted(sum(schedule.stages, ())) == list(range(p * schedule.v))
        split = schedule.name.startswith("ZB")
        wanted = Counter(product("FIW" if split else "FB", range(m), range(schedule.v)))
        for row in schedule.actions:
            assert Counter(map(tuple, row)) == wanted
        pl.simulate(schedule)  # no deadlock


@any_schedule
def test_a_generated_schedule_passes_the_check_of_one_written_by_hand(generate):
    for p, m in ((1, 1), (3, 2), (3, 7), (4, 8)):
        ours = generate(p, m)
        again = pl.schedule_by_hand(texts(ours), ours.stages)
        assert again.actions == ours.actions and again.stages == ours.stages
        assert Schedule(ours.name, m, ours.stages, ours.actions).actions == ours.actions


def test_gpipe_of_huang_et_al_1811_06965_figure_2c():
    assert texts(pl.gpipe(4, 4)) == ["F1 F2 F3 F4 B4 B3 B2 B1"] * 4


def test_1f1b_of_narayanan_et_al_2104_04473_figure_4_top():
    # 4 ranks, 8 micro-batches; the figure's first and last rank.
    rows = texts(pl.one_f_one_b(4, 8))
    assert rows[0] == "F1 F2 F3 F4 B1 F5 B2 F6 B3 F7 B4 F8 B5 B6 B7 B8"
    assert rows[3] == "F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7 F8 B8"


def test_interleaved_passes_groups_of_p_through_one_chunk_after_the_other():
    # Narayanan et al., figure 4, bottom: rank 0 of 4 with 8 micro-batches and 2 chunks.
    row = texts(pl.interleaved_1f1b(4, 8, 2))[0]
    forward = [name for name in row.split() if name[0] == "F"]
    backward = [name for name in row.split() if name[0] == "B"]
    blocks = [(first, chunk) for first in (1, 5) for chunk in (1, 2)]
    assert forward == [f"F{first + i}.{chunk}" for first, chunk in blocks for i in range(4)]
    assert backward == [f"B{first + i}.{3 - chunk}" for first, chunk in blocks for i in range(4)]
    assert row.startswith("F1.1 F2.1 F3.1 F4.1 F1.2 F2.2 F3.2 F4.2 F5.1 F6.1 F7.1 B1.2 F8.1 B2.2")


def test_stages_lie_in_a_loop_or_in_a_v():
    assert [pl.interleaved_1f1b(4, 8, 2).stage(rank, 1) for rank in range(4)] == [4, 5, 6, 7]
    assert [pl.zero_bubble_v(4, 8).stage(rank, 1) for rank in range(4)] == [7, 6, 5, 4]
    assert pl.zero_bubble_v(4, 8).ranks == (0, 1, 2, 3, 3, 2, 1, 0)


@pytest.mark.parametrize("p, m", [(2, 4), (4, 8), (8, 16), (4, 30), (5, 9)])
def test_peaks_in_flight_are_those_of_the_papers(p, m):
    peaks = {name: pl.simulate(make(p, m)).peak_in_flight for name, make in GENERATORS.items()}
    assert peaks["GPipe"] == [m] * p
    assert peaks["1F1B"] == [p - rank for rank in range(p)]
    assert peaks["ZB-H1"] == [p] * p  # 2401.10241, table 1: that of 1F1B's first rank
    assert peaks["ZB-H2"] == [2 * p - 1] * p  # the same table
    assert peaks["ZB-V"] == [2 * p] * p  # chunks of half the size: 1F1B's again


@pytest.mark.parametrize("p", range(1, 7))
def test_1f1b_with_few_micro_batches_holds_no_more_than_there_are(p):
    for m in range(1, p + 3):
        peaks = pl.simulate(pl.one_f_one_b(p, m)).peak_in_flight
        assert peaks == [min(m, p - rank) for rank in range(p)]


def test_interleaved_peak_of_torchs_stages_in_a_real_run():
    # Recorded from stage.fwd_cache of torch 2.13, 4 gloo ranks, 8 micro-batches, 2 chunks.
    assert pl.simulate(pl.interleaved_1f1b(4, 8, 2)).peak_in_flight == [11, 9, 7, 5]


@pytest.mark.parametrize("p, v", [(2, 2), (4, 2), (8, 3), (3, 5)])
def test_interleaved_holds_the_layers_of_korthikanti_et_al_2205_05198(p, v):
    # L (1 + (p - 1) / (p v)) layers on the first stage, in units of L / (p v) layers.
    for m in (2 * p, 3 * p):
        assert pl.simulate(pl.interleaved_1f1b(p, m, v)).peak_in_flight[0] == p * v + p - 1


@pytest.mark.parametrize("layers, h, a, p, v, gib", [(96, 12288, 96, 8, 3, 66.84375)])
def test_peak_bytes_meet_the_published_activations_of_a_175b_model(layers, h, a, p, v, gib):
    config = ModelConfig(layers=layers, hidden=h, heads=a, vocab=51200)
    size = {"sequence": 2048, "tp": 8}
    memory = pl.activation_memory(config, 1, **size, pipeline=p, chunks=v)
    timeline = pl.simulate(pl.interleaved_1f1b(p, 64, v))
    peak = timeline.peak_bytes(layers // (p * v) * memory.layer_bytes)[0]
    assert peak == memory.total == gib * 2**30


def test_peak_bytes_of_unequal_stages():
    # 1F1B on 2 ranks: rank 0 holds 2 micro-batches, rank 1 one.
    assert pl.simulate(pl.one_f_one_b(2, 4)).peak_bytes([10, 7]) == [20, 7]
    # ZB-V on 1 rank, 1 micro-batch: both chunks at once.
    assert pl.simulate(pl.zero_bubble_v(1, 1)).peak_bytes([10, 7]) == [17]


def test_chunks_of_one_micro_batch_count_once_as_micro_batches():
    timeline = pl.simulate(pl.interleaved_1f1b(2, 2, 3))  # rank 0: all 6 F, then all 6 B
    assert timeline.peak_in_flight[0] == 6 and timeline.peak_micro_batches[0] == 2
    assert pl.simulate(pl.one_f_one_b(4, 8)).peak_micro_batches == [4, 3, 2, 1]


@pytest.mark.parametrize("p, m, v", [(2, 5, 1), (4, 8, 1), (4, 8, 3), (1, 4, 2), (3, 2, 2)])
def test_a_loop_sends_2_m_pv_less_1_messages(p, m, v):
    messages = pl.interleaved_1f1b(p, m, v).messages
    assert sum(map(sum, messages)) == (2 * m * (p * v - 1) if p > 1 else 0)
    assert sum(activations for activations, _ in messages) == sum(grads for _, grads in messages)


@pytest.mark.parametrize("p, m", [(1, 3), (2, 3), (4, 8)])
def test_a_v_keeps_its_turn_and_its_ends_on_one_rank(p, m):
    assert sum(map(sum, pl.zero_bubble_v(p, m).messages)) == 4 * m * (p - 1)


def test_one_chunk_interleaved_is_1f1b():
    assert pl.interleaved_1f1b(4, 6, 1).actions == pl.one_f_one_b(4, 6).actions


def test_a_schedule_is_read_only_and_shares_its_actions():
    schedule = pl.one_f_one_b(4, 6)
    with pytest.raises(AttributeError):
        schedule.m = 3
    assert isinstance(schedule.actions, tuple) and isinstance(schedule.actions[0], tuple)
    assert len({id(action) for row in schedule.actions for action in row}) == 12


BAD_SIZES = [(0, "ValueError"), (-1, "ValueError"), (2.0, "TypeError"), (True, "TypeError")]


@any_schedule
@pytest.mark.parametrize("value, error", [*BAD_SIZES, ("4", "TypeError")], ids=str)
def test_sizes_that_are_no_counts_are_named(generate, value, error):
    for name, sizes in (("p", (value, 4)), ("m", (4, value))):
        with pytest.raises((ValueError, TypeError), match=f"^{name} must be an int") as info:
            generate(*sizes)
        assert info.typename == error


@pytest.mark.parametrize("v", [0, -2, 1.5, None])
def test_chunks_that_cannot_be_grouped_are_named(v):
    with pytest.raises((ValueError, TypeError), match="^v must be an int"):
        pl.interleaved_1f1b(4, 8, v)


@any_schedule
def test_absurd_sizes_are_refused_at_once(generate):
    for p, m in ((10**9, 1), (1, 10**9), (5000, 5000), (10**30, 10**30)):
        with pytest.raises(ValueError, match="p, m and v must make at most 2500000 actions"):
            generate(p, m)


def test_zero_bubble_v_on_many_ranks_with_few_micro_batches_is_short():
    schedule = pl.zero_bubble_v(3000, 2)
    assert {len(row) for row in schedule.actions} == {12}


# By hand.


def test_a_schedule_by_hand_takes_text_and_tuples():
    text = pl.schedule_by_hand(["F1 F2 B1 B2", "F1 B1 F2 B2"])
    rows = [[("F", 0), ("F", 1), ("B", 0, 0), ("B", 1)], text.actions[1]]
    assert pl.schedule_by_hand(rows).actions == text.actions
    assert (text.name, text.p, text.m, text.v) == ("by hand", 2, 2, 1)
    assert all(isinstance(action, pl.Action) for row in text.actions for action in row)


def test_a_schedule_by_hand_may_split_backward_on_one_rank_only():
    pl.schedule_by_hand(["F1 B1", "F1 I1 W1"], name="mixed")


@pytest.mark.parametrize(
    "rows, message",
    [
        (["F1 B1 F2", "F1 B1 F2 B2"], "rank 0 must run F2 and its backward, .* got F2$"),
        (["F1 B1", "B1"], "rank 1 must run F1 and its backward, .* got B1$"),
        (["F1 B1 F2 B2", "F1 B1"], "rank 1 must run F2 and its backward, .* got neither"),
        (["F1 I1"], "rank 0 must run F1 and its backward, B or I and W, got F1 I1"),
        (["F1 B1 I1 W1"], "got F1 B1 I1 W1"),
        (["F1 B1 F1"], "rank 0 runs F1 twice, at positions 0 and 2"),
        (["F1 B1", "F1 B1 B1"], "rank 1 runs B1 twice, at positions 1 and 2"),
        (["F1 B1", ""], "rank 1 must run something"),
        ([], "rows must have at least one rank"),
        (["F1 C1"], "rank 0, position 1: an action is F, B, I or W and a number from 1.* 'C1'"),
        (["F0 B0"], "rank 0, position 0: .* a number from 1.* 'F0'"),
        (["F1 B1", [("F", 0), ("X", 0)]], "rank 1, position 1: kind must be one of F, B, I, W"),
        ([[("F", -1)]], "rank 0, position 0: micro_batch must be an int of at least 0"),
        ([[("F", 0, -1)]], "rank 0, position 0: chunk must be an int of at least 0"),
        (["F999999999 B1"], "rank 0 must run F1 and its backward"),
        (["F1 B1 F1.9 B1.9"], "chunks must be numbered without gaps"),
        (["F1.2 B1.2 F1.1 B1.1", "F1.2 B1.2"], "rank 1 must run F1.1 and its backward"),
    ],
    ids=lambda value: value if isinstance(value, str) else str(value)[:40],
)
def test_what_is_wrong_with_a_schedule_by_hand_is_named_with_its_place(rows, message):
    with pytest.raises(ValueError, match=message):
        pl.schedule_by_hand(rows)


@pytest.mark.parametrize(
    "rows", ["F1 B1", 3, None, [3], [[3]], [["F1", None]], [[("F",)]]], ids=str
)
def test_rows_of_another_kind_are_a_type_error(rows):
    with pytest.raises(TypeError, match="rows must be one list or text for each rank|an action is"):
        pl.schedule_by_hand(rows)


@pytest.mark.parametrize(
    "rows, message",
    [
        (
            ["F1 B1 F2 B2", "F1 F2 B1 B2"],
            "deadlock: rank 0 waits at position 1 with B1 for B1 of rank 1; "
            "rank 1 waits at position 1 with F2 for F2 of rank 0$",
        ),
        (["B1 F1"], "rank 0 waits at position 0 with B1 for F1 of its own, which comes later"),
        (["F1 W1 I1"], "rank 0 waits at position 1 with W1 for I1 of its own"),
        (["F1 W1 I1", "F1 I1 W1"], "rank 0 waits at position 1 with W1 for I1 of its own"),
        (["F1 B1", "B1 F1"], "rank 0 waits at position 1 with B1 for B1 of rank 1; rank 1 waits"),
        (["F1.2 F1.1 B1.2 B1.1"], "position 0 with F1.2 for F1.1 of its own"),
    ],
    ids=lambda value: value if isinstance(value, str) else str(value),
)
def test_a_deadlock_names_the_actions_that_block(rows, message):
    with pytest.raises(ValueError, match=message):
        pl.schedule_by_hand(rows)


def test_a_long_deadlock_is_told_shortly():
    rows = ["F1 B1 F2 B2"] * 20 + ["F1 F2 B1 B2"]
    with pytest.raises(ValueError, match="rank 0 waits .* rank 4 .* 21 ranks in all") as info:
        pl.schedule_by_hand(rows)
    assert len(str(info.value)) < 500


@pytest.mark.parametrize(
    "stages, message",
    [
        ([[0], [0]], "got 2 for stage 0"),
        ([[0], [2]], "got 0 for stage 1"),
        ([[0, 1], [2]], "equally many stages"),
        ([[], []], "equally many stages"),
        ([[0]], "actions must have a list for each of 1 ranks, got 2"),
        ([[0], [-1]], "stages must be an int of at least 0, got -1"),
    ],
    ids=str,
)
def test_stages_without_exactly_one_place_are_named(stages, message):
    with pytest.raises(ValueError, match=message):
        pl.schedule_by_hand(["F1 B1", "F1 B1"], stages)


def test_a_schedule_made_directly_is_checked_too():
    with pytest.raises(ValueError, match="rank 0, position 1: B2 must be one of 1 micro-batches"):
        Schedule("mine", 1, [[0]], [[("F", 0), ("B", 1)]])
    with pytest.raises(ValueError, match="m must be an int of at least 1, got 0"):
        Schedule("mine", 0, [[0]], [[]])


# Layers.


@pytest.mark.parametrize(
    "layers, stages, counts",
    [(30, 4, [8, 8, 7, 7]), (10, 3, [4, 3, 3]), (2, 4, [1, 1, 0, 0]), (0, 2, [0, 0])],
    ids=["Megatron-LM 1304", "libai PR 225", "fewer layers than stages", "none"],
)
def test_layers_that_do_not_divide_are_not_dropped(layers, stages, counts):
    assert [len(stage) for stage in pl.split_layers(layers, stages)] == counts


def test_splits_are_complete_disjoint_and_even_for_all_sizes_up_to_40():
    for layers, stages in product(range(41), range(1, 41)):
        split = pl.split_layers(layers, stages)
        assert [layer for stage in split for layer in stage] == list(range(layers))
        assert len(split) == stages and {layers // stages, -(-layers // stages)} >= {
            len(stage) for stage in split
        }


@given(st.integers(0, 60), st.integers(1, 12), st.integers(0, 40), st.integers(0, 40))
def test_no_other_split_has_a_shorter_slowest_stage(layers, stages, embedding, head):
    # In quarters of a layer, so that sums of floats are exact.
    split = pl.split_layers(layers, stages, embedding=embedding / 4, head=head / 4)
    extra = [0] * stages
    extra[0] += embedding
    extra[-1] += head
    slowest = max(4 * len(stage) + more for stage, more in zip(split, extra, strict=True))
    room = sum(max(slowest - 1 - more, 0) // 4 for more in extra)
    assert sum(map(len, split)) == layers
    assert max(extra) == slowest or room < layers


@pytest.mark.parametrize(
    "change, error",
    [
        ({"layers": -1}, ValueError),
        ({"layers": 2.5}, TypeError),
        ({"layers": 10**9}, ValueError),
        ({"stages": 0}, ValueError),
        ({"head": -1}, ValueError),
        ({"embedding": float("nan")}, ValueError),
        ({"head": "big"}, TypeError),
    ],
    ids=str,
)
def test_bad_layers_are_named(change, error):
    with pytest.raises(error, match=f"^{next(iter(change))} must be "):
        pl.split_layers(**{"layers": 10, "stages": 2, **change})
