"""Schedules executed between real processes, against sums made serially with NumPy."""

import argparse
import functools
import os
import subprocess
import sys

import numpy as np
import pytest

from parlab.collectives import schedules as s
from parlab.collectives.cost import traffic
from parlab.distributed.compare import sizes
from parlab.distributed.launch import RankError, run_ranks
from parlab.distributed.measure import sweep

# 10 elements are no multiple of 3 or 4; 2 leave some chunks empty.
SHAPES = {"ten": (10,), "two": (2,), "three-by-seven": (3, 7), "scalar": (), "none": (0,)}
DTYPES = ("int64", "uint8", "float32")
SEGMENTS = {"whole chunks": None, "16-byte segments": 16}


def swap_all_reduce_schedule(n_ranks):
    """Partners exchange whole tensors: what a rank sends and receives in one step is one chunk."""
    steps = []
    distance = 1
    while distance < n_ranks:
        steps.append(tuple(s.Send(r, r ^ distance, 0, True) for r in range(n_ranks)))
        distance *= 2
    return s.Schedule("all_reduce", n_ranks, 1, tuple(steps))


def crossing_all_reduce_schedule():
    """In step 2 rank 1 passes its partial sum on while the complete one arrives in its place."""
    steps = (
        (s.Send(0, 1, 0, True), s.Send(3, 2, 0, True)),
        (s.Send(1, 2, 0, True),),
        (s.Send(2, 1, 0, False), s.Send(1, 3, 0, True)),
        (s.Send(2, 0, 0, False), s.Send(2, 3, 0, False)),
    )
    return s.Schedule("all_reduce", 4, 1, steps)


def schedules_for(n):
    found = {
        "ring": s.ring_all_reduce_schedule(n),
        "ring, other ownership": s.ring_all_reduce_schedule(n, shift=1),
        "ring reduce-scatter": s.ring_reduce_scatter_schedule(n),
        "ring reduce-scatter, other ownership": s.ring_reduce_scatter_schedule(n, shift=1),
        "ring all-gather": s.ring_all_gather_schedule(n),
        "ring all-gather, other ownership": s.ring_all_gather_schedule(n, shift=1),
        "binomial": s.binomial_all_reduce_schedule(n),
        "halving-doubling": s.halving_doubling_schedule(n),
        "naive": s.naive_all_reduce_schedule(n),
        "broadcast": s.broadcast_schedule(n),
        "broadcast from the last": s.broadcast_schedule(n, root=n - 1),
        "one node": s.hierarchical_schedule(1, n),
        "one rank per node": s.hierarchical_schedule(n, 1),
    }
    if n % 2 == 0:
        found["two nodes"] = s.hierarchical_schedule(2, n // 2)
        found["swap"] = swap_all_reduce_schedule(n)
    if n == 4:
        found["crossing"] = crossing_all_reduce_schedule()
    return found


def values(rank, shape, dtype):
    """Whole numbers small enough that even uint8 holds the sum of four ranks exactly."""
    count = int(np.prod(shape))
    return ((np.arange(count) * 31 + rank * 17) % 59).astype(dtype).reshape(shape)


def all_cases(n):
    for name, schedule in schedules_for(n).items():
        for shape in SHAPES:
            for dtype in DTYPES:
                for segments in SEGMENTS:
                    yield (name, shape, dtype, segments), schedule


@functools.cache
def real_runs(n):
    """One launch runs every case: case -> one (result, sent bytes) per rank."""

    def run_all():
        import torch
        import torch.distributed as dist

        from parlab.distributed.ring import run_schedule

        results = {}
        for case, schedule in all_cases(n):
            _, shape, dtype, segments = case
            tensor = torch.from_numpy(values(dist.get_rank(), SHAPES[shape], dtype))
            before = tensor.clone()
            result, sent = run_schedule(schedule, tensor, segment_bytes=SEGMENTS[segments])
            assert torch.equal(tensor, before)
            results[case] = result.numpy(), sent
        return results

    by_rank = run_ranks(run_all, n, timeout=60)
    return {case: [results[case] for results in by_rank] for case, _ in all_cases(n)}


def chunks_of(array, schedule):
    return np.array_split(array.reshape(-1), schedule.n_chunks)


@pytest.mark.parametrize(
    ("n", "name"), [(n, name) for n in (1, 2, 3, 4) for name in schedules_for(n)]
)
def test_a_schedule_leaves_what_its_operation_promises(n, name):
    schedule = schedules_for(n)[name]
    for case, results in real_runs(n).items():
        if case[0] != name:
            continue
        inputs = [values(rank, SHAPES[case[1]], case[2]) for rank in range(n)]
        total = np.sum(inputs, axis=0, dtype=case[2])
        for rank, (result, _) in enumerate(results):
            assert result.shape == inputs[0].shape and result.dtype == inputs[0].dtype, case
            for c, chunk in enumerate(chunks_of(result, schedule)):
                if schedule.operation == "all_reduce":
                    expected = chunks_of(total, schedule)[c]
                elif schedule.operation == "reduce_scatter":
                    if schedule.owner[c] != rank:
                        continue
                    expected = chunks_of(total, schedule)[c]
                else:
                    expected = chunks_of(inputs[schedule.owner[c]], schedule)[c]
                np.testing.assert_array_equal(chunk, expected, err_msg=f"{case}, rank {rank}")


@pytest.mark.parametrize("n", [2, 3, 4])
def test_ranks_send_the_bytes_that_the_schedule_counts(n):
    for case, schedule in all_cases(n):
        _, shape, dtype, _ = case
        sizes = [chunk.nbytes for chunk in chunks_of(values(0, SHAPES[shape], dtype), schedule)]
        counted = [sent for _, sent in real_runs(n)[case]]
        assert counted == list(traffic(schedule, sizes).sent), case


@pytest.fixture(scope="module")
def two_rank_facts():
    """What two ranks find about single calls, gathered in one launch."""

    def find():
        import torch
        import torch.distributed as dist

        from parlab.collectives import schedules
        from parlab.distributed.measure import profile_all_reduce, sweep, wire_bytes
        from parlab.distributed.ring import all_reduce, run_schedule

        rank = dist.get_rank()
        ring = schedules.ring_all_reduce_schedule(2)
        facts = {}

        def refusal(call):
            try:
                return call()
            except Exception as error:
                return f"{type(error).__name__}: {error}"

        grid = torch.arange(12.0).reshape(3, 4) + rank
        facts["column"] = all_reduce(grid[:, 1]).tolist()
        mixed = grid.T if rank else grid.T.contiguous()
        facts["layouts that differ"] = all_reduce(mixed).tolist()
        facts["ring column"] = run_schedule(ring, grid[:, 1])[0].tolist()
        facts["ring transposed"] = run_schedule(ring, grid.T)[0].tolist()
        facts["grid unchanged"] = torch.equal(grid, torch.arange(12.0).reshape(3, 4) + rank)
        facts["mean"] = all_reduce(torch.tensor([3.0 + rank]), "mean").tolist()
        facts["mean of integers"] = refusal(lambda: all_reduce(torch.tensor([3 + rank]), "mean"))
        int8 = torch.tensor([(120, 100)[rank]], dtype=torch.int8)
        facts["int8 overflow"] = refusal(lambda: all_reduce(int8))
        facts["int8"] = all_reduce(int8 - 60).tolist()
        large = torch.tensor([2**62 + 2 * rank])
        facts["int64"] = all_reduce(large - 2).tolist()
        facts["int64 overflow"] = refusal(lambda: all_reduce(large))
        facts["bool"] = refusal(lambda: all_reduce(torch.tensor([True])))
        facts["op"] = refusal(lambda: all_reduce(grid, "max"))
        facts["ranks"] = refusal(lambda: run_schedule(schedules.ring_all_reduce_schedule(3), grid))
        facts["segment"] = refusal(lambda: run_schedule(ring, grid, segment_bytes=0))
        facts["out"] = refusal(lambda: run_schedule(ring, grid, out=torch.empty(12)))
        facts["shared"] = refusal(lambda: run_schedule(ring, grid, out=grid))
        torch.manual_seed(rank)
        noise = torch.randn(100_003)
        torchs = noise.clone()
        dist.all_reduce(torchs)
        facts["noise"] = run_schedule(ring, noise, segment_bytes=4096)[0].numpy()
        facts["torch's noise"] = torchs.numpy()
        tensor = torch.ones(500_000)
        calls = {
            "torch": lambda: dist.all_reduce(tensor),
            "segmented": lambda: run_schedule(ring, tensor, segment_bytes=100_000),
            "plain": lambda: run_schedule(ring, tensor, segment_bytes=None),
        }
        facts["wire"] = {name: wire_bytes(call, tries=10) for name, call in calls.items()}
        methods = ("all_reduce", "segmented", "plain")
        facts["sweep"] = sweep([4096, 10**6], methods, seconds_per_size=0.05)
        facts["profile"] = profile_all_reduce(10**6, repeats=3)
        return facts

    return run_ranks(find, 2, timeout=60)


@pytest.mark.parametrize(
    ("fact", "expected"),
    [
        ("column", [3.0, 11.0, 19.0]),
        ("ring column", [3.0, 11.0, 19.0]),
        ("layouts that differ", [[2 * (4 * j + i) + 1 for j in range(3)] for i in range(4)]),
        ("ring transposed", [[2 * (4 * j + i) + 1 for j in range(3)] for i in range(4)]),
        ("grid unchanged", True),
        ("mean", [3.5]),
        ("int8", [100]),
        ("int64", [2**63 - 2]),
    ],
)
def test_all_reduce_is_right_for_strided_and_integer_tensors(two_rank_facts, fact, expected):
    assert [facts[fact] for facts in two_rank_facts] == [expected, expected]


@pytest.mark.parametrize(
    ("fact", "beginning"),
    [
        ("mean of integers", "TypeError: the mean of torch.int64 is no integer (of 3 and 4 it"),
        ("int8 overflow", "ValueError: a sum leaves the range of torch.int8, -128 to 127"),
        ("int64 overflow", "ValueError: a sum leaves the range of torch.int64"),
        ("bool", "TypeError: tensor must hold numbers, got torch.bool"),
        ("op", "ValueError: op must be one of sum, mean, got 'max'"),
        ("ranks", "ValueError: schedule is for 3 ranks, but the group has 2"),
        ("segment", "ValueError: segment_bytes must be an int of at least 1, got 0"),
        ("out", "ValueError: out must be contiguous with the tensor's shape (3, 4)"),
        ("shared", "ValueError: out must not share memory"),
    ],
)
def test_a_wrong_call_is_refused_on_every_rank_with_a_reason(two_rank_facts, fact, beginning):
    for facts in two_rank_facts:
        assert facts[fact].startswith(beginning)


def test_ranks_end_with_the_same_bits_and_with_torchs_sum(two_rank_facts):
    first, second = two_rank_facts
    np.testing.assert_array_equal(first["noise"].view("int32"), second["noise"].view("int32"))
    # Two summands commute, so even the rounding is torch's.
    np.testing.assert_array_equal(first["noise"], first["torch's noise"])


def test_four_ranks_end_with_the_same_bits_near_the_exact_sum():
    def reduce_noise():
        import torch
        import torch.distributed as dist

        from parlab.collectives.schedules import ring_all_reduce_schedule
        from parlab.distributed.ring import run_schedule

        torch.manual_seed(dist.get_rank())
        noise = torch.randn(10_001)
        return noise.numpy(), run_schedule(ring_all_reduce_schedule(4), noise)[0].numpy()

    inputs, results = zip(*run_ranks(reduce_noise, 4), strict=True)
    for result in results:
        np.testing.assert_array_equal(result.view("int32"), results[0].view("int32"))
    exact = np.sum(inputs, axis=0, dtype="float64")
    # Three float32 additions err by at most three roundings of the largest partial sum.
    bound = 3 * 2.0**-24 * np.sum(np.abs(inputs), axis=0, dtype="float64")
    assert (np.abs(results[0] - exact) <= bound).all()


def test_a_schedule_runs_inside_a_subgroup():
    def reduce_in_group():
        import torch
        import torch.distributed as dist

        from parlab.collectives.schedules import ring_all_reduce_schedule
        from parlab.distributed.ring import run_schedule

        group = dist.new_group([2, 1])
        if dist.get_rank() == 0:
            return None
        mine = torch.full((5,), dist.get_rank())
        return run_schedule(ring_all_reduce_schedule(2), mine, group)[0].tolist()

    assert run_ranks(reduce_in_group, 3) == [None, [3] * 5, [3] * 5]


@pytest.mark.skipif(not os.path.exists("/proc/net/dev"), reason="no loopback counter here")
@pytest.mark.parametrize("method", ["torch", "segmented", "plain"])
def test_the_bytes_on_the_wire_are_those_of_the_formula(two_rank_facts, method):
    formula = 2 * (2 - 1) * 2_000_000
    assert 1.00 <= two_rank_facts[0]["wire"][method] / formula <= 1.02


def test_a_sweep_times_every_method_and_finds_the_sums_equal(two_rank_facts):
    for timing, size in zip(two_rank_facts[0]["sweep"], [4096, 10**6], strict=True):
        assert timing.tensor_bytes == size and timing.equal
        assert {len(times) for times in timing.seconds.values()} == {len(timing.seconds["plain"])}
        assert timing.ratio("all_reduce") == 1.0 and timing.median("segmented") > 0
    assert two_rank_facts[0]["sweep"][0].seconds == two_rank_facts[1]["sweep"][0].seconds


def test_the_profiler_sees_each_transfer_and_each_enqueue(two_rank_facts):
    transfer, enqueue = two_rank_facts[0]["profile"]
    assert len(transfer) == len(enqueue) == 3 and min(transfer) > 0


def test_a_wrong_size_is_refused_by_the_sweep():
    with pytest.raises(RankError, match="a size must be at least 4 bytes, one float32, got 3"):
        run_ranks(sweep, 2, args=([3],))


def program(*arguments):
    command = [sys.executable, "-m", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_under_torchrun_the_program_prints_a_table_of_equal_sums():
    done = program(
        "torch.distributed.run", "--standalone", "--nproc_per_node=2",
        "-m", "parlab.distributed.ring", "--sizes", "4KB:100KB", "--backend", "gloo",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines()[2:]]
    assert [" ".join(row[:2]) for row in rows] == ["4 kB", "16 kB", "64 kB", "100 kB"]
    assert all(row[-1] == "equal" for row in rows)


def test_without_torchrun_the_program_says_the_command():
    done = program("parlab.distributed.ring")
    assert done.returncode == 2
    assert "torchrun --nproc_per_node=2 -m parlab.distributed.ring" in done.stderr


@pytest.mark.parametrize("text", ["64MB:4KB", "1B:4KB", "4KB", "4KB:64 miles"])
def test_sizes_that_make_no_range_are_refused(text):
    with pytest.raises(argparse.ArgumentTypeError, match=f"got {text!r}"):
        sizes(text)
