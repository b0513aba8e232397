"""Data parallelism between real processes, against the same training done serially."""

import functools
import subprocess
import sys

import numpy as np
import pytest

from parlab.buckets import ddp_buckets
from parlab.distributed.launch import RankError, run_ranks

# Weights and gradients stay below 1; a float64 sum of some hundred of them in another order.
ROUNDING = {"float64": 1e-15, "float32": 5e-7}
# Rows per number of ranks: one split that is even and one that is not; 4 ranks also share 3 rows.
SPLITS = [(2, 8), (2, 5), (4, 8), (4, 3)]
DTYPES = ("float64", "float32")
LENGTHS = ((3, 16), (7, 1))  # by rank and micro-batch
WEIGHTINGS = ("tokens", "ranks", "micro_batches", "averaged_again")


@functools.cache
def real_runs(n):
    """All that n ranks are asked in this file, in one launch: one dictionary per rank."""

    def run_all():
        import torch.distributed as dist

        from parlab.distributed import data_parallel as dp
        from parlab.distributed import ddp_facts, ddp_watch

        found = {}
        for rows in [rows for ranks, rows in SPLITS if ranks == n]:
            for dtype in DTYPES:
                found["hand", rows, dtype] = dp.train_by_hand(rows, dtype=dtype)
                found["ddp", rows, dtype] = dp.train_ddp(rows, dtype=dtype)
        uneven = {"lengths": [1, 16, 4, 9, 2]}
        found["hand, lengths"] = dp.train_by_hand(5, **uneven)
        found["ddp, lengths"] = dp.train_ddp(5, **uneven, cap_mb=0.01)
        found["hand, ranks"] = dp.train_by_hand(5, weighting="ranks")
        found["ddp, ranks"] = dp.train_ddp(5, weighting="ranks")
        found["equal, ranks"] = dp.train_by_hand(8, weighting="ranks")
        facts = ("start_weights", "buffers_at_forward", "nan_on_one_rank", "batch_norm_gap")
        found.update({name: getattr(ddp_facts, name)() for name in facts})
        if n == 2:
            for weighting in WEIGHTINGS:
                found[weighting] = dp.token_weighted_step(LENGTHS, weighting=weighting)
            for where in ("forward and backward", "backward", "nothing"):
                found["no_sync", where] = ddp_facts.no_sync_gradients(where)
            for find in (False, True):
                found["unused", find] = ddp_facts.unused_parameter_error(find)
            for cap in (None, 0, 0.5, 1):
                found["buckets", cap] = ddp_watch.record_buckets(cap, 3)
            found["buckets, unused"] = ddp_watch.record_buckets(
                None, 2, find_unused_parameters=True
            )
            found["overlap"] = ddp_watch.profile_overlap(0.5, rows=2)
        found["rank"] = dist.get_rank()
        return found

    return run_ranks(run_all, n, timeout=100)


@functools.cache
def serial(rows, dtype="float64", lengths=None, steps=3):
    from parlab.distributed.data_parallel import train_serial

    return train_serial(rows, steps, dtype=dtype, lengths=lengths)


def test_the_serial_run_is_sgd_with_momentum_on_the_gradient_of_the_mean_loss():
    import torch
    from torch.nn.functional import cross_entropy
    from torch.nn.utils import parameters_to_vector, vector_to_parameters

    from parlab.distributed.gpt import GPT, TINY, token_batch

    training, model = serial(4, steps=2), GPT(TINY).double()
    tokens, targets = token_batch(TINY, 4)
    first, second = training.gradients
    after_one = training.before - 0.1 * first
    for weights, gradient in ((training.before, first), (after_one, second)):
        vector_to_parameters(torch.from_numpy(weights), model.parameters())
        loss = cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        expected = parameters_to_vector(torch.autograd.grad(loss, list(model.parameters())))
        np.testing.assert_allclose(gradient, expected.numpy(), rtol=0, atol=1e-15)
    expected = after_one - 0.1 * (0.9 * first + second)
    np.testing.assert_allclose(training.weights, expected, rtol=0, atol=1e-15)


def assert_close(training, reference, tolerance):
    np.testing.assert_allclose(training.losses, reference.losses, rtol=0, atol=20 * tolerance)
    np.testing.assert_allclose(training.gradients, reference.gradients, rtol=0, atol=tolerance)
    np.testing.assert_allclose(training.weights, reference.weights, rtol=0, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "rows"), SPLITS)
@pytest.mark.parametrize("how", ["hand", "ddp"])
def test_every_rank_trains_as_one_process_with_the_whole_batch_does(how, n, rows, dtype):
    for found in real_runs(n):
        assert_close(found[how, rows, dtype], serial(rows, dtype), ROUNDING[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "rows"), SPLITS)
def test_replicas_hold_the_same_bits_after_three_steps(n, rows, dtype):
    for how in ("hand", "ddp"):
        first, *others = [found[how, rows, dtype] for found in real_runs(n)]
        assert all(np.array_equal(first.weights, other.weights) for other in others)
        assert first.weights.dtype == dtype
        assert not np.array_equal(first.before, first.weights)  # the test has seen training
        assert first.losses[2] < first.losses[1] < first.losses[0]


@pytest.mark.parametrize("dtype", DTYPES)
def test_on_two_ranks_ddp_gives_the_bits_of_the_training_by_hand(dtype):
    # Two numbers have one sum. With more ranks the order of the sum depends on the place in the
    # buffer, which for DDP holds all gradients.
    for rows in (8, 5):
        for found in real_runs(2):
            hand, ddp = found["hand", rows, dtype], found["ddp", rows, dtype]
            assert np.array_equal(hand.gradients, ddp.gradients)
            assert np.array_equal(hand.weights, ddp.weights)


@pytest.mark.parametrize("how", ["hand", "ddp"])
@pytest.mark.parametrize("n", [2, 4])
def test_rows_of_different_lengths_are_weighted_by_their_tokens(n, how):
    reference = serial(5, lengths=(1, 16, 4, 9, 2))
    for found in real_runs(n):
        assert_close(found[f"{how}, lengths"], reference, ROUNDING["float64"])


def test_the_mean_of_means_is_exact_for_equal_shards_only():
    for found in real_runs(2):
        assert_close(found["equal, ranks"], serial(8), ROUNDING["float64"])
        # 5 rows: 3 on rank 0 and 2 on rank 1, so a row counts 1/6 or 1/4 instead of 1/5.
        wrong = found["hand, ranks"]
        assert np.array_equal(wrong.gradients, found["ddp, ranks"].gradients)
        gap = np.abs(wrong.gradients[0] - serial(5).gradients[0]).max()
        assert gap > 0.02 * np.abs(serial(5).gradients[0]).max()


def losses_of_rows(lengths):
    """Summed loss and number of tokens of each row alone: the serial run of a single row."""
    from parlab.distributed.gpt import GPT, TINY, token_batch, token_loss

    tokens, targets = token_batch(TINY, len(lengths), lengths=lengths)
    model = GPT(TINY).double()
    rows = zip(tokens.split(1), targets.split(1), strict=True)
    return [token_loss(model(row), target, "sum").item() for row, target in rows]


def test_accumulation_over_ranks_is_exact_with_the_global_number_of_tokens():
    reference = serial(4, lengths=(3, 16, 7, 1), steps=1)
    for found in real_runs(2):
        loss, gradient = found["tokens"]
        assert loss == pytest.approx(reference.losses[0], rel=1e-14)
        np.testing.assert_allclose(gradient, reference.gradients[0], rtol=0, atol=1e-15)


def test_each_other_divisor_gives_the_loss_and_the_gradient_of_its_own_mean():
    a, b, c, d = losses_of_rows([3, 16, 7, 1])
    means = {
        "ranks": ((a + b) / 19 + (c + d) / 8) / 2,
        "micro_batches": (a / 3 + b / 16 + c / 7 + d / 1) / 4,
        "averaged_again": (a + b + c + d) / 27 / 4,
    }
    right = serial(4, lengths=(3, 16, 7, 1), steps=1).gradients[0]
    for found in real_runs(2):
        for weighting, mean in means.items():
            assert found[weighting][0] == pytest.approx(mean, rel=1e-14)
            gap = np.abs(found[weighting][1] - right).max() / np.abs(right).max()
            assert gap > 0.2
        # Two ranks and two micro-batches: a quarter, exactly.
        np.testing.assert_allclose(found["averaged_again"][1], right / 4, rtol=0, atol=1e-15)


BUCKET_BYTES = {
    None: [1056768, 2395136],  # the first closes at 2^20, the next would at 25 x 2^20
    0.5: [527872, 528896, 529408, 527872, 528896, 529408, 279552],
    1: [1056768, 1057280, 1058304, 279552],
}


@pytest.mark.parametrize("cap_mb", [None, 0, 0.5, 1])
def test_buckets_follow_the_order_of_the_gradients_and_close_when_full(cap_mb):
    first, second = (found["buckets", cap_mb] for found in real_runs(2))
    total = sum(n_bytes for _, n_bytes in first.ready)
    in_order = [n_bytes for _, n_bytes in first.ready]
    cap = None if cap_mb is None else int(cap_mb * 2**20)
    expected = [bucket.bytes for bucket in ddp_buckets(in_order, cap, order=range(len(in_order)))]
    assert expected == BUCKET_BYTES.get(cap_mb, in_order)
    for buckets in (first, second):
        assert buckets.sizes(0) == [total]
        assert buckets.sizes(1) == buckets.sizes(2) == expected
        names = [name for bucket in buckets.iterations[1] for name in bucket.parameters]
        assert names == [name for name, _ in buckets.ready]
        assert [bucket.index for bucket in buckets.iterations[1]] == list(range(len(expected)))


def test_where_ddp_looks_for_unused_parameters_it_keeps_the_order_of_definition():
    from parlab.distributed.ddp_watch import SMALL
    from parlab.distributed.gpt import GPT

    sizes = [parameter.nbytes for parameter in GPT(SMALL).parameters()]
    predicted = ddp_buckets(sizes, order=range(len(sizes)))[::-1]
    for found in real_runs(2):
        for iteration in (0, 1):
            recorded = found["buckets, unused"].sizes(iteration)
            assert recorded == [bucket.bytes for bucket in predicted] == [2380800, 1071104]


def test_the_tied_embedding_is_ready_last_and_a_buckets_times_are_in_order():
    buckets = real_runs(2)[0]["buckets", 0.5]
    assert buckets.ready[0][0] == "norm.weight" and buckets.ready[-1][0] == "tokens.weight"
    for iteration, seconds in zip(buckets.iterations, buckets.backward_s, strict=True):
        started = [bucket.started_s for bucket in iteration]
        assert started == sorted(started)
        for bucket in iteration:
            assert 0 < bucket.started_s < bucket.finished_s < seconds


def test_the_profile_shows_the_transfers_of_one_step_and_its_computation():
    from parlab.distributed.ddp_watch import exposed_seconds

    intervals = real_runs(2)[0]["overlap"]
    kinds = [interval.kind for interval in intervals]
    assert kinds.count("forward") == 1 and kinds.count("all_reduce") == 7
    forward, *later = intervals
    assert forward.kind == "forward" and all(i.start_s >= forward.end_s for i in later)
    backward = [i for i in later if i.kind == "backward"]
    assert all(a.end_s < b.start_s for a, b in zip(backward, backward[1:], strict=False))
    first_transfer = min(i.start_s for i in later if i.kind == "all_reduce")
    assert backward[0].start_s < first_transfer < backward[-1].end_s  # they overlap
    assert 0 <= exposed_seconds(intervals) < max(i.end_s for i in intervals)


def test_exposed_time_is_that_of_transfers_beside_no_computation():
    from parlab.distributed.ddp_watch import Interval, exposed_seconds

    def line(start, end, kind="all_reduce"):
        return Interval(start, end, kind)

    computing = [line(0, 2, "forward"), line(2, 5, "backward"), line(6, 7, "backward")]
    assert exposed_seconds(computing) == 0
    assert exposed_seconds([line(1, 3), *computing]) == 0
    # From 5 to 6 and from 7 to 9; two transfers at once count once.
    assert exposed_seconds([*computing, line(4, 8), line(3, 9)]) == 3
    assert exposed_seconds([line(1, 2), line(4, 6)]) == 3


@pytest.mark.parametrize("n", [2, 4])
def test_ddp_sends_rank_0s_weights_at_the_start_and_its_buffers_at_each_forward(n):
    for name in ("start_weights", "buffers_at_forward"):
        assert [found[name] for found in real_runs(n)] == [(r + 1.0, 1.0) for r in range(n)]


@pytest.mark.parametrize("n", [2, 4])
def test_batch_norm_makes_the_average_of_equal_shards_inexact(n):
    for found in real_runs(n):
        without, with_batch_norm = found["batch_norm_gap"]
        assert without < 1e-14 and with_batch_norm > 0.01


def test_no_sync_must_enclose_the_forward_pass_too():
    first, second = real_runs(2)
    assert [f["no_sync", "forward and backward"] for f in (first, second)] == [1.0, 2.0]
    assert [f["no_sync", "backward"] for f in (first, second)] == [1.5, 1.5]
    assert [f["no_sync", "nothing"] for f in (first, second)] == [1.5, 1.5]


def test_an_unused_parameter_fails_at_the_second_forward_unless_ddp_looks_for_it():
    for found in real_runs(2):
        step, message = found["unused", False]
        assert step == 2
        assert "Expected to have finished reduction in the prior iteration" in message
        assert f"did not receive grad for rank {found['rank']}: 2 3" in message
        assert found["unused", True] == (None, "")


@pytest.mark.parametrize("n", [2, 4])
def test_a_nan_on_one_rank_reaches_all(n):
    assert [found["nan_on_one_rank"] for found in real_runs(n)] == [True] * n


@pytest.mark.parametrize(
    ("items", "ranks", "drop_last", "expected"),
    [
        (10, 4, False, [[0, 4, 8], [1, 5, 9], [2, 6, 0], [3, 7, 1]]),
        (10, 4, True, [[0, 4], [1, 5], [2, 6], [3, 7]]),
        (1, 3, False, [[0], [0], [0]]),
        (2, 3, True, [[], [], []]),
    ],
    ids=["padded", "dropped", "one item", "nothing left"],
)
def test_the_sampler_deals_rows_in_turn(items, ranks, drop_last, expected):
    from parlab.distributed.ddp_facts import sampler_rows

    assert sampler_rows(items, ranks, drop_last=drop_last) == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rows": 0}, "rows must be an int of at least 1, got 0"),
        ({"steps": 0}, "steps must be an int of at least 1, got 0"),
        ({"rows": 2, "lengths": [0, 0]}, "lengths must count at least one target"),
        ({"dtype": "int32"}, "dtype must be one of float64, float32, got 'int32'"),
    ],
    ids=["rows", "steps", "lengths", "dtype"],
)
def test_training_on_nothing_is_refused(arguments, message):
    from parlab.distributed.data_parallel import train_serial

    with pytest.raises(ValueError, match=message):
        train_serial(**arguments)


@pytest.mark.parametrize(
    ("lengths", "message"),
    [([[1, 2]], "one list for each of the 2 ranks"), ([[1, 2], [3, 0]], "at least 1, got 0")],
    ids=["ranks", "no tokens"],
)
def test_lengths_that_do_not_fit_the_ranks_are_refused(lengths, message):
    from parlab.distributed.data_parallel import token_weighted_step

    with pytest.raises(RankError, match=message):
        run_ranks(token_weighted_step, 2, args=(lengths,))


def program(*arguments):
    command = [sys.executable, "-m", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("n", [2, 3])
def test_the_demo_prints_one_line_under_torchrun(n):
    done = program(
        "torch.distributed.run", "--standalone", f"--nproc_per_node={n}",
        "-m", "parlab.distributed.ddp_demo", "--mb", "0.4", "--backend", "gloo",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    assert line.startswith(
        f"{n} x gloo: gradients match the full batch; all-reduce of 400 kB takes "
    )
    assert line.endswith("B/s")


def test_without_torchrun_the_demo_says_the_command():
    done = program("parlab.distributed.ddp_demo")
    assert done.returncode == 2
    assert "torchrun --nproc_per_node=2 -m parlab.distributed.ddp_demo" in done.stderr
