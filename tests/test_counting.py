"""Collectives recorded by the counter: every kind, with the bytes that its arguments have."""

import pickle

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from parlab.distributed import compat
from parlab.distributed.counting import Call, CollectiveCounter
from parlab.distributed.launch import run_ranks


def seen(counter):
    return [(call.op, call.phase, call.bytes, call.n_ranks) for call in counter.calls]


def call_every_kind():
    n, rank = dist.get_world_size(), dist.get_rank()
    three, out = torch.ones(3), [torch.empty(3) for _ in range(n)]
    with CollectiveCounter() as counter:
        dist.all_reduce(three)
        dist.all_reduce(torch.ones(5, dtype=torch.bfloat16), async_op=True).wait()
        compat.all_gather_rows(torch.empty(n * 3), three)
        dist.all_gather(out, three)
        compat.reduce_scatter_rows(torch.empty(2), torch.ones(n * 2))
        dist.all_to_all_single(torch.empty(n), torch.ones(n))
        dist.broadcast(three, 0)
        dist.reduce(three, 0)
        dist.barrier()
        if rank == 0:
            dist.send(torch.ones(7), 1)
        else:
            dist.recv(torch.ones(7), 0)
        three + three
    dist.all_reduce(three)  # after the block, so not counted
    return seen(counter), counter.calls[1].dtype, counter.calls[1].shape


def test_every_kind_is_recorded_once_with_the_bytes_of_the_whole_tensor():
    expected = [
        ("all_reduce", 12),
        ("all_reduce", 10),
        ("all_gather", 24),
        ("all_gather", 24),
        ("reduce_scatter", 16),
        ("all_to_all", 8),
        ("broadcast", 12),
        ("reduce", 12),
        ("barrier", 0),
    ]
    expected = [(op, "forward", size, 2) for op, size in expected]
    (sender, dtype, shape), (receiver, *_) = run_ranks(call_every_kind, 2)
    assert sender == [*expected, ("send", "forward", 28, 2)]
    assert receiver == expected
    assert (dtype, shape) == (torch.bfloat16, (5,))


def call_in_a_group_of_two():
    from torch.distributed import _functional_collectives as functional

    pair = dist.new_group([0, 1])
    if dist.get_rank() == 2:
        return []
    with CollectiveCounter() as counter:
        dist.all_reduce(torch.ones(3), group=pair)
        functional.wait_tensor(functional.all_reduce(torch.ones(4), "sum", pair))
    return seen(counter)


def test_the_group_of_a_call_counts_not_the_world():
    pair = [("all_reduce", "forward", 12, 2), ("all_reduce", "forward", 16, 2)]
    assert run_ranks(call_in_a_group_of_two, 3) == [pair, pair, []]


def train_with_ddp():
    model = torch.nn.Linear(4, 5)
    with CollectiveCounter() as counter:
        parallel = torch.nn.parallel.DistributedDataParallel(model)
        with counter.named_phase("step"):
            parallel(torch.ones(2, 4)).sum()
        parallel(torch.ones(2, 4)).sum().backward()
    return seen(counter)


def test_ddp_broadcasts_at_the_start_and_reduces_its_bucket_in_backward():
    for calls in run_ranks(train_with_ddp, 2):
        *start, last = calls
        # 20 weights and 5 biases of 4 bytes, after DDP has compared shapes by smaller messages.
        assert ("broadcast", "forward", 100, 2) in start
        assert not [call for call in start if call[0] == "all_reduce"]
        assert last == ("all_reduce", "backward", 100, 2)


def redistribute_a_dtensor():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    whole = torch.arange(8.0).view(4, 2)
    rows = distribute_tensor(whole, mesh, [Shard(0)])
    columns = distribute_tensor(whole.T.contiguous(), mesh, [Shard(1)])
    with CollectiveCounter() as counter:
        again = (rows * 2).redistribute(mesh, [Replicate()]).to_local() + 0
        # The product is a partial sum, which relu completes inside its own operator.
        square = (columns @ rows).relu().to_local() + 0
    return seen(counter), torch.equal(again, 2 * whole) and torch.equal(square, whole.T @ whole)


def test_a_dtensor_is_counted_by_what_the_ranks_exchange():
    for calls, equal in run_ranks(redistribute_a_dtensor, 2):
        assert calls == [("all_gather", "forward", 32, 2), ("all_reduce", "forward", 16, 2)]
        assert equal


class SumBothWays(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        dist.all_reduce(x.clone())
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient + 0 * ctx.saved_tensors[0]


def test_forward_recompute_and_backward_are_told_apart():
    with compat.fake_process_group(2), CollectiveCounter() as counter:
        x = torch.ones(3, requires_grad=True)
        run = SumBothWays.apply
        y = checkpoint(run, x, use_reentrant=False, context_fn=counter.recomputing)
        y.sum().backward()
    assert counter.summary() == {
        ("forward", "all_reduce"): 1,
        ("recompute", "all_reduce"): 1,
        ("backward", "all_reduce"): 1,
    }
    assert counter.count("all_reduce") == counter.count() == 3
    assert counter.bytes("all_reduce", "recompute") == 12
    assert counter.count("all_gather") == counter.bytes(phase="update") == 0


def test_a_named_phase_ends_with_its_block_even_by_an_error():
    with compat.fake_process_group(2), CollectiveCounter() as counter:
        with pytest.raises(KeyError), counter.named_phase("outer"):
            with counter.named_phase("inner"):
                dist.all_reduce(torch.ones(1))
            dist.all_reduce(torch.ones(1))
            raise KeyError
        dist.all_reduce(torch.ones(1))
    assert [call.phase for call in counter.calls] == ["inner", "outer", "forward"]


def test_fake_tensors_are_counted_at_full_size():
    with compat.fake_process_group(8), compat.fake_tensors(), CollectiveCounter() as counter:
        x = torch.empty(2**20, 2**10)
        dist.all_reduce(x)
        compat.all_gather_rows(torch.empty(8 * 2**20, 2**10), x)
    assert [call.bytes for call in counter.calls] == [2**32, 2**35]


@pytest.mark.parametrize(
    "op, size, n, ring",
    [
        ("all_reduce", 512, 4, 768),
        ("all_gather", 512, 4, 384),
        ("reduce_scatter", 512, 4, 384),
        ("all_reduce", 33_554_432, 8, 58_720_256),
        ("all_reduce", 10, 4, 15.0),
        ("all_reduce", 10, 1, 0),
    ],
)
def test_ring_bytes_of_a_call(op, size, n, ring):
    assert Call(op, "forward", size, torch.uint8, (size,), n).ring_bytes == ring


def test_a_broadcast_has_no_ring_bytes():
    with pytest.raises(ValueError, match="op must be one of all_reduce, .* got 'broadcast'"):
        _ = Call("broadcast", "forward", 8, torch.float32, (2,), 2).ring_bytes


def test_a_counter_can_be_sent_back_by_a_rank():
    with compat.fake_process_group(2), CollectiveCounter() as counter:
        dist.all_reduce(torch.ones(3))
    again = pickle.loads(pickle.dumps(counter))
    assert again.calls == counter.calls and again.bytes() == 12


def test_the_process_group_may_not_exist_twice():
    with compat.fake_process_group(2):
        with pytest.raises(RuntimeError, match="a process group exists already"):
            compat.fake_process_group(2).__enter__()
        assert dist.get_world_size() == 2
    assert not dist.is_initialized()


def test_an_operator_that_may_be_a_collective_is_not_passed_over_in_silence():
    library = torch.library.Library("c10d", "FRAGMENT")
    library.define("swap_(Tensor x) -> Tensor")
    library.impl("swap_", lambda x: x, "CPU")
    with pytest.raises(NotImplementedError, match="swap_"), CollectiveCounter():
        torch.ops.c10d.swap_(torch.ones(1))


def test_the_adapter_knows_when_autograd_runs():
    inside = []
    x = torch.ones(1, requires_grad=True)
    x.register_hook(lambda gradient: inside.append(compat.in_backward()))
    (2 * x).sum().backward()
    assert inside == [True] and not compat.in_backward()
