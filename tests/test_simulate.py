"""Simulated collectives: sums equal an independent sum, bytes equal the formula, inputs stay."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import parlab as pl
from parlab.collectives.schedules import Schedule, Send

ALL_REDUCES = {
    "ring": pl.ring_all_reduce,
    "tree": pl.tree_all_reduce,
    "halving-doubling": pl.halving_doubling_all_reduce,
    "naive": pl.naive_all_reduce,
    "hierarchical of 1": lambda arrays, **kw: pl.hierarchical_all_reduce(arrays, 1, **kw),
    "hierarchical of all": lambda arrays, **kw: pl.hierarchical_all_reduce(
        arrays, len(arrays), **kw
    ),
}
every_all_reduce = pytest.mark.parametrize("all_reduce", ALL_REDUCES.values(), ids=ALL_REDUCES)


def ranks_of_integers(max_ranks=9):
    """Strategy: int64 arrays of one arbitrary shape, empty and 0-d ones too, for 1 to 9 ranks."""
    shapes = hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=7)
    values = st.integers(-(2**57), 2**57)

    def arrays(n, shape):
        return st.lists(hnp.arrays(np.int64, shape, elements=values), min_size=n, max_size=n)

    return st.tuples(st.integers(1, max_ranks), shapes).flatmap(lambda pair: arrays(*pair))


@every_all_reduce
@settings(max_examples=60, deadline=None)
@given(arrays=ranks_of_integers())
def test_every_rank_ends_with_the_exact_sum_and_inputs_stay(all_reduce, arrays):
    before = [array.copy() for array in arrays]
    # Python's own integers are the independent route: they neither wrap nor round.
    expected = [sum(int(array.flat[i]) for array in arrays) for i in range(arrays[0].size)]
    results, sent = all_reduce(arrays)
    assert len(results) == len(sent) == len(arrays)
    for result in results:
        assert result.shape == arrays[0].shape and result.dtype == np.int64
        assert result.ravel().tolist() == expected
    for array, copy in zip(arrays, before, strict=True):
        assert array.tobytes() == copy.tobytes()


@every_all_reduce
@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", ">f8", "c8", "i1", "u8", "i8"])
def test_dtype_is_kept_and_all_ranks_end_bitwise_equal(all_reduce, dtype):
    rng = np.random.default_rng(0)
    arrays = [(10 * rng.random((5, 3))).astype(dtype) for _ in range(6)]
    results, _ = all_reduce(arrays)
    assert {result.dtype for result in results} == {np.dtype(dtype)}
    assert len({result.tobytes() for result in results}) == 1
    wide = "c16" if dtype == "c8" else "f8"
    exact = np.sum([array.astype(wide) for array in arrays], axis=0)
    # Five additions round at most five times: 5 eps relative, for terms of one sign.
    eps = np.finfo(dtype).eps if np.dtype(dtype).kind in "fc" else 0
    np.testing.assert_allclose(results[0].astype(wide), exact, rtol=5 * eps)


@pytest.mark.parametrize("n_ranks, sent", [(2, 512), (4, 768), (8, 896)])
def test_ring_bytes_of_64_doubles(n_ranks, sent):
    results, counted = pl.ring_all_reduce([np.arange(64.0)] * n_ranks)
    assert counted == [sent] * n_ranks
    np.testing.assert_array_equal(results[-1], n_ranks * np.arange(64.0))


@pytest.mark.parametrize("n_ranks, received", [(2, 512), (4, 1536), (8, 3584)])
def test_naive_root_moves_bytes_that_grow_with_the_ranks(n_ranks, received):
    _, sent = pl.naive_all_reduce([np.zeros(64)] * n_ranks)
    assert sum(sent[1:]) == received == sent[0]


@every_all_reduce
@settings(max_examples=60, deadline=None)
@given(n_ranks=st.integers(1, 9), size=st.integers(0, 40))
def test_no_all_reduce_sends_less_than_2_n_minus_1_tensors_in_total(all_reduce, n_ranks, size):
    _, sent = all_reduce([np.zeros(size, np.int32)] * n_ranks)
    assert sum(sent) == 2 * (n_ranks - 1) * size * 4


@given(n_ranks=st.integers(1, 12), size=st.integers(0, 60))
def test_ring_bytes_per_rank_are_those_of_all_chunks_but_two_sent_twice(n_ranks, size):
    _, sent = pl.ring_all_reduce([np.zeros(size)] * n_ranks)
    chunks = [part.nbytes for part in np.array_split(np.zeros(size), n_ranks)]
    whole = sum(chunks)
    # Rank r never sends the chunk r that it finishes, nor in the gather that of its neighbour.
    for rank in range(n_ranks):
        assert sent[rank] == 2 * whole - chunks[rank] - chunks[(rank + 1) % n_ranks]


@settings(deadline=None)
@given(arrays=ranks_of_integers())
def test_all_reduce_is_reduce_scatter_then_all_gather(arrays):
    scattered, first = pl.ring_reduce_scatter(arrays)
    gathered, second = pl.ring_all_gather(scattered)
    reduced, sent = pl.ring_all_reduce(arrays)
    assert sent == [a + b for a, b in zip(first, second, strict=True)]
    for whole, flat in zip(reduced, gathered, strict=True):
        np.testing.assert_array_equal(whole.ravel(), flat)


@given(arrays=ranks_of_integers())
def test_reduce_scatter_gives_rank_r_chunk_r(arrays):
    scattered, _ = pl.ring_reduce_scatter(arrays)
    expected = np.array_split(np.sum(arrays, axis=0).ravel(), len(arrays))
    for mine, chunk in zip(scattered, expected, strict=True):
        np.testing.assert_array_equal(mine, chunk)


@given(sizes=st.lists(st.integers(0, 9), min_size=1, max_size=9))
def test_all_gather_takes_uneven_shards_and_keeps_trailing_axes(sizes):
    shards = [np.full((size, 2), rank) for rank, size in enumerate(sizes)]
    results, sent = pl.ring_all_gather(shards)
    for result in results:
        np.testing.assert_array_equal(result, np.concatenate(shards))
    total = sum(shard.nbytes for shard in shards)
    assert sent == [
        (total - shards[(rank + 1) % len(sizes)].nbytes) if len(sizes) > 1 else 0
        for rank in range(len(sizes))
    ]


def test_all_gather_of_scalars_makes_a_vector():
    results, _ = pl.ring_all_gather([1.0, 2.0, 3.0])
    assert results[2].tolist() == [1.0, 2.0, 3.0]


@given(n_ranks=st.integers(1, 20), data=st.data())
def test_broadcast_delivers_any_dtype_and_sends_n_minus_1_copies(n_ranks, data):
    root = data.draw(st.integers(0, n_ranks - 1))
    array = np.array([[True, False, True]])
    results, sent = pl.broadcast(array, n_ranks, root=root)
    assert [result.tolist() for result in results] == [array.tolist()] * n_ranks
    assert sum(sent) == (n_ranks - 1) * 3 and (n_ranks == 1 or sent[root] == max(sent))


@every_all_reduce
@pytest.mark.parametrize(
    "cut",
    [lambda a: a[:, 0], lambda a: a.T, lambda a: a[::-1, ::2], lambda a: a[1, 1]],
    ids=["column", "transpose", "reversed", "scalar"],
)
def test_strided_inputs_are_summed_right(all_reduce, cut):
    full = [np.arange(20).reshape(4, 5) * (rank + 1) for rank in range(4)]
    results, _ = all_reduce([cut(array) for array in full])
    for result in results:
        np.testing.assert_array_equal(result, cut(10 * np.arange(20).reshape(4, 5)))


@every_all_reduce
def test_integers_above_2_to_53_keep_every_bit(all_reduce):
    results, _ = all_reduce([np.array([2**53 + 1]), np.array([2**60 + 1])])
    assert results[0][0] == 2**53 + 2**60 + 2


@every_all_reduce
@pytest.mark.parametrize(
    "values, dtype",
    [
        ([120, 100], "i1"),
        ([-100, -100], "i1"),
        ([200, 56], "u1"),
        ([2**62, 2**62], "i8"),
        ([-(2**63), -1], "i8"),
        ([2**63, 2**63], "u8"),
    ],
)
def test_an_integer_sum_that_does_not_fit_is_refused(all_reduce, values, dtype):
    with pytest.raises(ValueError, match=f"the sum {sum(values)} at index .2,. does not fit"):
        all_reduce([np.array([0, 0, value], dtype) for value in values])


@every_all_reduce
@pytest.mark.parametrize(
    "values, dtype",
    [([120, 100, -100], "i1"), ([200, 55], "u1"), ([2**63 - 1, 0], "i8"), ([-(2**63), 0], "i8")],
)
def test_an_integer_sum_that_just_fits_is_right(all_reduce, values, dtype):
    # The decoys make the sum of the ranks' extremes leave the range, so the exact check decides.
    decoys = 100 * np.eye(len(values), dtype=int)
    arrays = [np.array([v, *decoy], dtype) for v, decoy in zip(values, decoys, strict=True)]
    results, _ = all_reduce(arrays)
    assert int(results[0][0]) == sum(values)


def test_the_mean_of_floats_is_right_and_that_of_integers_is_refused():
    results, _ = pl.ring_all_reduce([np.array([3.0]), np.array([4.0])], op="mean")
    assert results[1].tolist() == [3.5]
    with pytest.raises(TypeError, match="the mean of int64 values need not be a whole number"):
        pl.ring_all_reduce([np.array([3]), np.array([4])], op="mean")


def test_one_rank_gets_a_copy_and_sends_nothing():
    array = np.arange(3.0)
    (result,), sent = pl.ring_all_reduce([array])
    assert sent == [0] and result is not array and not np.shares_memory(result, array)


def test_a_nan_on_one_rank_reaches_all():
    results, _ = pl.ring_all_reduce([np.array([1.0, np.nan]), np.array([1.0, 1.0])])
    for result in results:
        np.testing.assert_array_equal(result, [2.0, np.nan])


def test_results_do_not_share_memory():
    results, _ = pl.ring_all_reduce([np.ones(5)] * 3)
    results[0][:] = -1
    assert results[1].tolist() == results[2].tolist() == [3.0] * 5


@pytest.mark.parametrize(
    "arrays, error, message",
    [
        ([], ValueError, "arrays must hold one array per rank, got none"),
        ([np.ones(2), np.ones(3)], ValueError, r"arrays\[1\] has shape \(3,\)"),
        ([np.ones(2), np.ones(2, "f4")], ValueError, r"arrays\[1\] has dtype float32"),
        ([[True], [False]], TypeError, "got dtype bool"),
        (["ab", "cd"], TypeError, "got dtype <U2"),
        ([[None], [None]], TypeError, r"arrays\[0\] must hold plain numbers"),
        ([[1, [2, 3]]], ValueError, r"arrays\[0\] is not an array"),
        ([np.ma.array([1, 2], mask=[0, 1])], TypeError, "mask would be lost"),
    ],
    ids=["none", "shapes", "dtypes", "bool", "text", "objects", "ragged", "masked"],
)
def test_arrays_that_cannot_be_summed_are_refused(arrays, error, message):
    with pytest.raises(error, match=message):
        pl.ring_all_reduce(arrays)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda a: pl.ring_all_reduce(a, op="max"), "op must be one of sum, mean"),
        (lambda a: pl.hierarchical_all_reduce(a, 3), "ranks_per_node must divide the 4 ranks"),
        (lambda a: pl.broadcast(a[0], 4, root=9), "root"),
        (lambda a: pl.run_on_arrays(pl.broadcast_schedule(4), a), "must be an all_reduce"),
        (lambda a: pl.run_on_arrays(pl.ring_all_reduce_schedule(3), a), "must be 3, one per rank"),
    ],
    ids=["op", "node", "root", "operation", "ranks"],
)
def test_other_bad_arguments_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call([np.ones(3)] * 4)


@pytest.mark.parametrize("n_nodes, ranks_per_node", [(2, 2), (3, 2), (2, 3), (4, 4)])
def test_hierarchical_equals_the_sum_for_sizes_that_do_not_divide(n_nodes, ranks_per_node):
    arrays = [np.arange(8) * (r + 1) for r in range(n_nodes * ranks_per_node)]
    results, sent = pl.hierarchical_all_reduce(arrays, ranks_per_node)
    for result in results:
        np.testing.assert_array_equal(result, np.sum(arrays, axis=0))
    assert sum(sent) == 2 * (len(arrays) - 1) * 64


def test_a_step_reads_before_it_writes():
    # Both ranks send their whole tensor at once: a sum in place would count one of them twice.
    exchange = tuple(Send(r, 1 - r, chunk, True) for r in (0, 1) for chunk in (0, 1))
    results, _ = pl.run_on_arrays(Schedule("all_reduce", 2, 2, (exchange,)), [[1, 2], [10, 20]])
    assert [result.tolist() for result in results] == [[11, 22], [11, 22]]


def test_rounding_follows_the_ring():
    # Adding 2^-53 to 1 is lost in rounding, twice over; the ring starts chunk 0 at rank 1, so the
    # two small terms meet first and survive.
    arrays = [np.array([v, 0.0, 0.0]) for v in (1.0, 2.0**-53, 2.0**-53)]
    results, _ = pl.ring_all_reduce(arrays)
    assert Fraction(results[0][0]) == 1 + Fraction(1, 2**52)


@every_all_reduce
@pytest.mark.parametrize("size", [8 * 2**13, 8 * 2**13 + 1, 100_003])
def test_chunks_too_long_to_be_moved_together_are_summed_the_same(all_reduce, size):
    rng = np.random.default_rng(0)
    arrays = [rng.integers(-(2**40), 2**40, size) for _ in range(8)]
    results, _ = all_reduce(arrays)
    expected = np.sum(arrays, axis=0)
    assert all(np.array_equal(result, expected) for result in results)
