"""Schedules do what their operation promises, step by step as the papers draw them."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parlab.collectives import schedules
from parlab.collectives.schedules import Schedule, Send, holdings, validate

MAKERS = {
    "ring": schedules.ring_all_reduce_schedule,
    "ring, shift 1": lambda n: schedules.ring_all_reduce_schedule(n, shift=1),
    "reduce-scatter": schedules.ring_reduce_scatter_schedule,
    "reduce-scatter, shift 1": lambda n: schedules.ring_reduce_scatter_schedule(n, shift=1),
    "all-gather": schedules.ring_all_gather_schedule,
    "all-gather, shift 1": lambda n: schedules.ring_all_gather_schedule(n, shift=1),
    "binomial": schedules.binomial_all_reduce_schedule,
    "halving-doubling": schedules.halving_doubling_schedule,
    "broadcast": schedules.broadcast_schedule,
    "naive": schedules.naive_all_reduce_schedule,
}


@pytest.mark.parametrize("maker", MAKERS.values(), ids=MAKERS)
@pytest.mark.parametrize("n_ranks", [*range(1, 18), 32, 33, 48])
def test_every_schedule_reduces_each_chunk_once_and_delivers_it(maker, n_ranks):
    validate(maker(n_ranks))


@pytest.mark.parametrize("n_nodes", range(1, 6))
@pytest.mark.parametrize("ranks_per_node", range(1, 9))
def test_hierarchical_schedule_is_valid(n_nodes, ranks_per_node):
    validate(schedules.hierarchical_schedule(n_nodes, ranks_per_node))


@pytest.mark.parametrize(
    "maker, steps",
    [
        ("ring", lambda n: 2 * (n - 1)),
        ("reduce-scatter", lambda n: n - 1),
        ("binomial", lambda n: 2 * (n - 1).bit_length()),
        ("broadcast", lambda n: (n - 1).bit_length()),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.parametrize("n_ranks", [1, 2, 3, 4, 7, 8, 31, 64])
def test_number_of_steps(maker, steps, n_ranks):
    assert len(MAKERS[maker](n_ranks).steps) == steps(n_ranks)


# The textbook picture of a ring of three ranks, with chunks a, b, c = 0, 1, 2: in every step the
# chunk that reaches ranks 0, 1, 2, and what each rank owns after the reduce-scatter.
TEXTBOOK_ARRIVALS = ["cab", "bca", "abc", "cab"]


def test_ring_of_three_follows_the_textbook_picture():
    ring = schedules.ring_all_reduce_schedule(3, shift=1)
    arrivals = [
        "".join("abc"[send.chunk] for send in sorted(step, key=lambda send: send.dst))
        for step in ring.steps
    ]
    assert arrivals == TEXTBOOK_ARRIVALS
    after_reduce_scatter = holdings(ring)[2]
    owned = ["abc"[[bin(h).count("1") for h in row].index(3)] for row in after_reduce_scatter]
    assert owned == ["b", "c", "a"]


@pytest.mark.parametrize("shift", [0, 1], ids=["torch", "textbook"])
@pytest.mark.parametrize("n_ranks", [2, 3, 8])
def test_reduce_scatter_leaves_rank_r_with_chunk_r_plus_shift(n_ranks, shift):
    final = holdings(schedules.ring_reduce_scatter_schedule(n_ranks, shift))[-1]
    complete = 2**n_ranks - 1
    for rank, row in enumerate(final):
        assert [c for c, held in enumerate(row) if held == complete] == [(rank + shift) % n_ranks]


@given(n_ranks=st.integers(1, 40), root=st.data())
def test_broadcast_reaches_all_from_any_root(n_ranks, root):
    validate(schedules.broadcast_schedule(n_ranks, root.draw(st.integers(0, n_ranks - 1))))


@given(n_ranks=st.integers(2, 12), data=st.data())
def test_any_ring_with_one_send_missing_is_refused(n_ranks, data):
    ring = schedules.ring_all_reduce_schedule(n_ranks)
    t = data.draw(st.integers(0, len(ring.steps) - 1))
    gone = data.draw(st.integers(0, n_ranks - 1))
    steps = list(ring.steps)
    steps[t] = steps[t][:gone] + steps[t][gone + 1 :]
    with pytest.raises(ValueError, match="without the contributions|overwrites"):
        validate(Schedule("all_reduce", n_ranks, n_ranks, tuple(steps)))


def all_reduce(*steps, n_ranks=2, n_chunks=1):
    return Schedule("all_reduce", n_ranks, n_chunks, steps)


@pytest.mark.parametrize(
    "schedule, message",
    [
        (
            all_reduce((Send(0, 1, 0, True),), (Send(0, 1, 0, True),)),
            "step 1, Send(src=0, dst=1, chunk=0, reduce=True): adds rank 0 a second time",
        ),
        (
            all_reduce((Send(0, 1, 0, False), Send(1, 0, 0, True))),
            "overwrites what it does not bring, rank 1",
        ),
        (all_reduce((Send(0, 0, 0, True),)), "src and dst must be two ranks from 0 to 1"),
        (all_reduce((Send(0, 2, 0, True),)), "src and dst must be two ranks from 0 to 1"),
        (all_reduce((Send(0, 1, 1, True),)), "chunk must be from 0 to 0"),
        (all_reduce((Send(0, 1, 0, True),)), "leaves rank 0 without the contributions of rank 1"),
        (
            Schedule("broadcast", 2, 1, ((Send(1, 0, 0, False),),), (0,)),
            "rank 1 holds nothing of that chunk yet",
        ),
        (
            Schedule("all_gather", 3, 3, (), (0, 1, 2)),
            "leaves rank 0 without the contributions of ranks 0, 1, 2 in chunk 1",
        ),
    ],
    ids=["twice", "overwritten", "to itself", "no rank", "no chunk", "missing", "early", "idle"],
)
def test_a_faulty_schedule_is_refused_with_the_faulty_send(schedule, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        validate(schedule)


@pytest.mark.parametrize(
    "make, error, message",
    [
        (lambda: schedules.ring_all_reduce_schedule(0), ValueError, "n_ranks"),
        (lambda: schedules.ring_all_reduce_schedule(2.0), TypeError, "n_ranks"),
        (lambda: schedules.ring_all_reduce_schedule(10**6), ValueError, "all_reduce_cost prices"),
        (lambda: schedules.hierarchical_schedule(1000, 1000), ValueError, "n_nodes"),
        (lambda: schedules.broadcast_schedule(4, root=4), ValueError, "root"),
        (lambda: Schedule("gather", 2, 1, ()), ValueError, "operation must be one of"),
        (lambda: Schedule("broadcast", 2, 1, ()), ValueError, "owner must name 1 ranks"),
        (lambda: Schedule("all_reduce", 2, 1, (), (0,)), ValueError, "owner must name 0 ranks"),
    ],
    ids=["none", "float", "huge", "huge product", "root", "operation", "no owner", "owner"],
)
def test_impossible_arguments_are_named(make, error, message):
    with pytest.raises(error, match=message):
        make()
