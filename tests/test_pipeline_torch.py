"""Our schedules against the action lists that torch.distributed.pipelining builds for itself."""

from itertools import product

import pytest

import parlab as pl
from parlab.distributed import compat, torch_schedules
from parlab.distributed.torch_schedules import differences, torch_schedule
from parlab.pipeline.schedules import Schedule

# LoopedBFS with one stage a rank is GPipe with the last micro-batch first, and torch's interleaved
# zero bubble with one stage a rank is ZB-H1.
PAIRS = {
    "GPipe": ("LoopedBFS", 1, pl.gpipe),
    "1F1B": ("1F1B", 1, pl.one_f_one_b),
    "interleaved 1F1B, v = 1": ("1F1B", 1, lambda p, m: pl.interleaved_1f1b(p, m, 1)),
    "interleaved 1F1B, v = 2": ("Interleaved1F1B", 2, lambda p, m: pl.interleaved_1f1b(p, m, 2)),
    "interleaved 1F1B, v = 3": ("Interleaved1F1B", 3, lambda p, m: pl.interleaved_1f1b(p, m, 3)),
    "ZB-H1": ("InterleavedZeroBubble", 1, pl.zero_bubble_h1),
    "ZB-V": ("ZBVZeroBubble", 2, pl.zero_bubble_v),
}


@pytest.mark.parametrize("name", PAIRS)
def test_our_lists_are_torchs(name):
    theirs_name, v, make = PAIRS[name]
    compared = 0
    for p, m in product((1, 2, 3, 4, 6), (*range(1, 9), 12, 13)):
        try:
            theirs = torch_schedule(theirs_name, p, m, v)
        except ValueError as refused:
            assert "icrobatches" in str(refused)  # torch's own rules: 1F1B m >= p, equal groups
            continue
        ours = make(p, m)
        assert differences(ours, theirs) == [], (p, m)
        assert pl.simulate(ours, 1, 2).ends == pl.simulate(theirs, 1, 2).ends
        compared += 1
    assert compared >= 30


def test_torchs_gpipe_runs_backward_in_the_order_of_forward():
    theirs = torch_schedule("GPipe", 3, 4)
    for ours, row in zip(pl.gpipe(3, 4).actions, theirs.actions, strict=True):
        assert row == (*ours[:4], *reversed(ours[4:]))
    assert pl.simulate(theirs, 1, 2).makespan == pl.simulate(pl.gpipe(3, 4), 1, 2).makespan


def test_torchs_1f1b_labels_the_last_ranks_forward_passes_from_1_on():
    # If torch has repaired this, the adapter leaves its labels alone, and this test can go.
    last = compat.torch_pipeline_order("1F1B", 4, 6)[-1]
    assert [i for _, kind, i in last if kind == "F"] == [1, 2, 3, 4, 5, 6]
    assert [i for _, kind, i in last if kind == "B"] == [0, 1, 2, 3, 4, 5]


def test_labels_that_are_right_stay_as_they_are(monkeypatch):
    rows = [[(0, kind, i) for i in range(3) for kind in "FB"] + [(0, "REDUCE_GRAD", None)]]
    monkeypatch.setattr(compat, "torch_pipeline_order", lambda *sizes: rows)
    assert torch_schedule("1F1B", 1, 3).actions == pl.one_f_one_b(1, 3).actions


def test_a_planted_disagreement_is_found_where_it_is():
    theirs = torch_schedule("Interleaved1F1B", 3, 6, 2)
    rows = [list(row) for row in theirs.actions]
    rows[1][7], rows[1][8] = rows[1][8], rows[1][7]
    planted = Schedule("planted", 6, theirs.stages, rows)
    ours = pl.interleaved_1f1b(3, 6, 2)
    assert differences(ours, theirs) == []
    assert differences(ours, planted) == [
        (1, 7, ours.actions[1][7], ours.actions[1][8]),
        (1, 8, ours.actions[1][8], ours.actions[1][7]),
    ]


def test_lists_of_unequal_length_and_other_places_are_told():
    shorter, longer = pl.one_f_one_b(1, 1), pl.one_f_one_b(1, 2)
    assert differences(shorter, longer) == [
        (0, 2, None, longer.actions[0][2]),
        (0, 3, None, longer.actions[0][3]),
    ]
    with pytest.raises(ValueError, match="schedules must place the same stages"):
        differences(pl.zero_bubble_v(2, 3), pl.interleaved_1f1b(2, 3, 2))


def test_unequal_groups_which_torch_refuses_have_the_same_bubble():
    with pytest.raises(ValueError, match="multiple of the number of rounds"):
        torch_schedule("Interleaved1F1B", 4, 11, 2)
    assert pl.simulate(pl.interleaved_1f1b(4, 11, 2)).bubble("ideal") == 3 / 22


@pytest.mark.parametrize(
    "sizes, error, message",
    [
        (("DualPipeV", 4, 8, 2), ValueError, "name must be one of GPipe, 1F1B"),
        (("1F1B", 0, 8), ValueError, "p must be an int of at least 1"),
        (("1F1B", 4, 8.0), TypeError, "m must be an int"),
        (("1F1B", 4, 2), ValueError, "microbatches"),
        (("ZBVZeroBubble", 4, 8, 3), ValueError, "2 stages"),
        (("1F1B", 100, 101), ValueError, "p m v must be at most 10000"),
    ],
    ids=str,
)
def test_what_torch_cannot_build_is_refused(sizes, error, message):
    with pytest.raises(error, match=message):
        torch_schedule(*sizes)


def test_every_name_is_one_of_torchs():
    for name in torch_schedules.TORCH_SCHEDULES:
        v = 2 if name in ("ZBVZeroBubble", "Interleaved1F1B", "InterleavedZeroBubble") else 1
        assert torch_schedule(name, 2, 4, v).name == f"torch {name}"
