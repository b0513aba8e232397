"""Tensor parallelism between real processes, against the unsharded layers and by counted calls."""

import math
from functools import partial

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from parlab.distributed import sharding, vocabulary
from parlab.distributed.agreement import TOLERANCE
from parlab.distributed.counting import CollectiveCounter
from parlab.distributed.gpt import IGNORE, MLP, GPTConfig
from parlab.distributed.launch import RankError, run_ranks
from parlab.distributed.local import on_each_rank, ranks_here
from parlab.distributed.tensor_parallel import (
    check_block,
    check_mlp,
    count_block,
    dtensor_block_counts,
    fake_full_size,
)
from parlab.distributed.vocabulary import check_vocabulary

WHOLE = {
    "attention_norm.weight",
    "attention_norm.bias",
    "attention.o.bias",
    "mlp_norm.weight",
    "mlp_norm.bias",
    "mlp.down.bias",
}
CUT = {f"attention.{layer}.{kind}" for layer in "qkv" for kind in ("weight", "bias")}
CUT |= {"attention.o.weight", "mlp.up.weight", "mlp.up.bias", "mlp.down.weight"}

BLOCKS = {
    "2 ranks": (2, {}),
    "4 ranks": (4, {"rows": 1, "sequence": 5}),
    "2 ranks, grouped queries": (2, {"kv_heads": 2}),
    "2 ranks, sequence parallel": (2, {"sequence_parallel": True, "kv_heads": 2}),
    "4 ranks, sequence parallel": (4, {"sequence_parallel": True, "rows": 3, "ffn": 20}),
    "1 rank, sequence parallel": (1, {"sequence_parallel": True}),
}


@pytest.mark.parametrize("n, rows", [(1, 1), (2, 3), (4, 8)])
def test_megatron_mlp_equals_the_whole_one_in_output_and_every_gradient(n, rows):
    for differences in run_ranks(partial(check_mlp, rows=rows), n):
        names = {"output", "x", "up.weight", "up.bias", "down.weight", "down.bias"}
        assert set(differences) == names
        assert max(differences.values()) <= TOLERANCE


@pytest.mark.parametrize("n, sizes", BLOCKS.values(), ids=BLOCKS)
def test_block_equals_the_whole_one_in_output_and_every_gradient(n, sizes):
    for differences in run_ranks(partial(check_block, **sizes), n):
        assert set(differences) == {"output", "x"} | WHOLE | CUT
        assert max(differences.values()) <= TOLERANCE


def test_without_their_sum_exactly_the_gradients_outside_the_regions_are_partial():
    check = partial(check_block, sequence_parallel=True, sum_partial=False)
    for differences in run_ranks(check, 2):
        wrong = {name for name, difference in differences.items() if difference > TOLERANCE}
        assert wrong == WHOLE
        assert min(differences[name] for name in WHOLE) > 0.1


REFUSED = {
    "heads": ({"hidden": 18, "heads": 6}, "heads must be a multiple of the 4 ranks, got 6"),
    "kv_heads": ({"kv_heads": 2}, "kv_heads must be a multiple of the 4 ranks, got 2"),
    "ffn": ({"ffn": 10}, "ffn must be a multiple of the 4 ranks, got 10"),
    "sequence": (
        {"sequence": 6, "sequence_parallel": True},
        "sequence must be a multiple of the 4 ranks, got 6",
    ),
    "rows": ({"rows": 0}, "rows must be an int of at least 1, got 0"),
}


def refusals():
    messages = {}
    for name, (sizes, _) in REFUSED.items():
        try:
            check_block(**sizes)
        except ValueError as error:
            messages[name] = str(error)
    try:
        config = GPTConfig(vocab=1, layers=1, hidden=4, heads=1, sequence=1, dropout=0.1)
        sharding.shard_layers(MLP(config))
    except ValueError as error:
        messages["dropout"] = str(error)
    try:
        check_vocabulary(vocab=30)
    except ValueError as error:
        messages["vocab"] = str(error)
    return messages


def test_what_the_ranks_cannot_share_is_refused_with_the_rule():
    for messages in run_ranks(refusals, 4):
        for name, (_, message) in REFUSED.items():
            assert messages[name].startswith(message)
        assert messages["dropout"].startswith("dropout must be 0 here, got 0.1")
        assert messages["vocab"].startswith("vocab must be a multiple of the 4 ranks, got 30")


def test_the_rule_reaches_the_caller_of_the_ranks():
    with pytest.raises(RankError, match="kv_heads must be a multiple of the 2 ranks, got 1"):
        run_ranks(partial(check_block, kv_heads=1), 2)


def add_the_bias():
    n, rank = dist.get_world_size(), dist.get_rank()
    x = torch.tensor([[[1.0, 2.0, 3.0, 4.0]]])
    weight = torch.arange(12.0).view(4, 3).T  # x W, so (out, in) is its transpose
    bias = torch.tensor([100.0, 200.0, 300.0])
    part = sharding.shards_of("down.weight", weight, n)[rank]
    layer = sharding.RowLinear(part.clone(), bias, sharding.g)
    return layer(x.chunk(n, -1)[rank]).flatten().tolist()


@pytest.mark.parametrize("n", [1, 2, 4])
def test_a_row_parallel_bias_is_added_once(n):
    assert run_ranks(add_the_bias, n) == [[160.0, 270.0, 380.0]] * n


OPERATORS = ("f", "g", "gather_sequence", "scatter_sequence")


def apply_operators():
    """Output and gradient of each operator, for x and an output gradient that tell ranks apart."""
    n, rank = dist.get_world_size(), dist.get_rank()
    found = {}
    for name in OPERATORS:
        x = (10.0**rank * torch.arange(1.0, 1 + 2 * n).view(1, 2 * n, 1)).requires_grad_()
        y = getattr(sharding, name)(x)
        arrived = torch.full_like(y, rank + 1.0)
        (y * arrived).sum().backward()
        found[name] = (y.flatten().tolist(), x.grad.flatten().tolist())
        assert x.flatten()[1] == 2 * 10.0**rank and (arrived == rank + 1).all()  # both unchanged
    strided = torch.arange(6.0).view(3, 2)[:, 0]
    found["strided"] = sharding.g(strided).tolist()
    return found


def test_each_operator_by_hand():
    first, second = run_ranks(apply_operators, 2)
    # x is [1, 2, 3, 4] and [10, 20, 30, 40]; the gradients that arrive are all 1 and all 2.
    assert first["f"] == ([1, 2, 3, 4], [3, 3, 3, 3])
    assert second["f"] == ([10, 20, 30, 40], [3, 3, 3, 3])
    assert first["g"] == ([11, 22, 33, 44], [1, 1, 1, 1])
    assert second["g"] == ([11, 22, 33, 44], [2, 2, 2, 2])
    gathered = [1, 2, 3, 4, 10, 20, 30, 40]
    assert first["gather_sequence"] == second["gather_sequence"] == (gathered, [3, 3, 3, 3])
    assert first["scatter_sequence"] == ([11, 22], [1, 1, 2, 2])
    assert second["scatter_sequence"] == ([33, 44], [1, 1, 2, 2])
    assert first["strided"] == second["strided"] == [0, 4, 8]


@pytest.mark.parametrize("n, dtype, size", [(2, torch.float32, 4), (4, torch.bfloat16, 2)])
def test_a_block_all_reduces_twice_in_forward_and_twice_in_backward(n, dtype, size):
    for counter in run_ranks(partial(count_block, rows=3, sequence=8, dtype=dtype), n):
        assert counter.summary() == {("forward", "all_reduce"): 2, ("backward", "all_reduce"): 2}
        assert [call.bytes for call in counter.calls] == [3 * 8 * 16 * size] * 4


@pytest.mark.parametrize("n", [2, 4])
def test_sequence_parallelism_moves_the_bytes_of_the_all_reduces(n):
    for counter in run_ranks(partial(count_block, sequence_parallel=True, rows=3), n):
        assert counter.summary() == {
            ("forward", "all_gather"): 2,
            ("forward", "reduce_scatter"): 2,
            ("backward", "all_gather"): 2,
            ("backward", "reduce_scatter"): 2,
            ("after backward", "all_reduce"): 1,
        }
        *block, partial_gradients = counter.calls
        assert [call.bytes for call in block] == [3 * 8 * 16 * 4] * 8
        assert sum(call.ring_bytes for call in block) == 4 * 2 * (n - 1) * 3 * 8 * 16 * 4 // n
        assert partial_gradients.bytes == 6 * 16 * 4


def test_torchs_plan_without_a_prepared_input_all_reduces_four_times_in_backward():
    for counted in run_ranks(dtensor_block_counts, 2):
        assert list(counted) == ["ours", "torch", "torch, prepared input"]
        for plan, (counter, difference) in counted.items():
            assert {call.op for call in counter.calls} == {"all_reduce"}
            assert {call.bytes for call in counter.calls} == {2 * 8 * 16 * 8}
            assert counter.count(phase="forward") == 2
            assert counter.count(phase="backward") == (4 if plan == "torch" else 2)
            assert difference <= TOLERANCE


def test_a_full_size_block_moves_the_published_bytes():
    counters = fake_full_size()
    assert {name: counter.summary() for name, counter in counters.items()} == {
        "none": {("forward", "all_reduce"): 2, ("backward", "all_reduce"): 2},
        "full": {
            ("forward", "all_reduce"): 2,
            ("recompute", "all_reduce"): 2,
            ("backward", "all_reduce"): 2,
        },
        "early stop": {
            ("forward", "all_reduce"): 2,
            ("recompute", "all_reduce"): 1,
            ("backward", "all_reduce"): 2,
        },
    }
    for counter in counters.values():
        assert {(call.bytes, call.dtype) for call in counter.calls} == {
            (33_554_432, torch.bfloat16)
        }
        assert {call.ring_bytes for call in counter.calls} == {58_720_256}
    assert counters["none"].ring_bytes() == 234_881_024
    assert torch.get_default_dtype() == torch.float32 and not dist.is_initialized()


def test_a_full_size_block_moves_the_same_bytes_with_sequence_parallelism():
    counters = fake_full_size(sequence_parallel=True)
    assert counters["none"].ring_bytes() == 234_881_024
    assert counters["full"].ring_bytes() == 6 * 58_720_256
    assert {call.bytes for call in counters["none"].calls} == {33_554_432}


@pytest.mark.parametrize(
    "sizes, message",
    [
        ({"tp": 64, "hidden": 64}, "heads must be a multiple of the 64 ranks, got 32"),
        ({"sequence": 4095, "sequence_parallel": True}, "sequence must be a multiple of the 8"),
        ({"batch": 0}, "batch must be an int of at least 1"),
    ],
)
def test_a_full_size_block_that_cannot_be_cut_is_refused(sizes, message):
    with pytest.raises(ValueError, match=message):
        fake_full_size(**sizes)
    assert torch.get_default_dtype() == torch.float32 and not dist.is_initialized()


@given(
    name=st.sampled_from(sorted(WHOLE | CUT)),
    n=st.integers(1, 5),
    share=st.integers(1, 4),
)
def test_shards_put_together_give_the_whole_parameter(name, n, share):
    shape = (n * share,) if name.endswith("bias") or "norm" in name else (n * share, 2 * n * share)
    whole = torch.arange(math.prod(shape)).view(shape)
    shards = sharding.shards_of(name, whole, n)
    assert len(shards) == n
    if name in WHOLE:
        assert all(torch.equal(shard, whole) for shard in shards)
    else:
        assert torch.equal(
            torch.cat(shards, 1 if name.split(".")[1] in ("o", "down") else 0), whole
        )


def test_a_parameter_that_cannot_be_cut_is_refused():
    with pytest.raises(ValueError, match="mlp.up.weight must be a multiple of the 4 ranks, got 6"):
        sharding.shards_of("mlp.up.weight", torch.ones(6, 4), 4)
    with pytest.raises(ValueError, match="name must be one of weight, bias"):
        sharding.shards_of("mlp.up", torch.ones(4, 4), 4)


@pytest.mark.parametrize("n", [1, 2, 4])
def test_vocabulary_parallel_embedding_and_loss_equal_the_whole_ones(n):
    for differences in run_ranks(check_vocabulary, n):
        assert set(differences) == {"embedded", "loss", "table"}
        assert max(differences.values()) <= 1e-13  # sums of 32 terms of order 1


def losses():
    n, rank = dist.get_world_size(), dist.get_rank()

    def loss(logits, targets, reduction="mean"):
        part = logits.chunk(n, -1)[rank].clone().requires_grad_()
        with CollectiveCounter() as counter:
            value = vocabulary.loss(part, targets, reduction)
            value.backward()
        return value.item(), part.grad, [call.bytes for call in counter.calls]

    large = torch.tensor([[[1000.0, 0.0, -1000.0, 999.0]]])
    two = torch.tensor([[3, 0]])
    found = {
        "zeros": loss(torch.zeros(1, 2, 8), two),
        "sum": loss(torch.zeros(1, 2, 8), two, "sum"),
        "large": loss(large, torch.tensor([[1]])),
        "half": loss(large.half(), torch.tensor([[1]])),
        "ignored": loss(torch.zeros(1, 2, 8), torch.tensor([[IGNORE, IGNORE]])),
    }
    for name, call in {
        "target": lambda: vocabulary.loss(torch.zeros(1, 1, 4), torch.tensor([[4 * n]])),
        "token": lambda: vocabulary.embed(torch.tensor([[-1]]), torch.zeros(4, 2)),
    }.items():
        try:
            call()
        except ValueError as error:
            found[name] = str(error)
    return found


@pytest.mark.parametrize("n", [2, 4])
def test_vocabulary_parallel_loss_of_known_logits(n):
    for rank, found in enumerate(run_ranks(losses, n)):
        value, gradient, sent = found["zeros"]
        assert value == pytest.approx(math.log(8), abs=1e-6)
        # (1/8 - one hot) / 2 tokens, at this rank's logits
        expected = torch.full((1, 2, 8), 1 / 16)
        expected[0, 0, 3] = expected[0, 1, 0] = -7 / 16
        torch.testing.assert_close(gradient, expected.chunk(n, -1)[rank])
        assert sent == [2 * 4, 2 * 2 * 4]  # the largest; the denominator and the target's logit
        assert found["sum"][0] == pytest.approx(2 * math.log(8), abs=1e-6)
        assert found["large"][0] == pytest.approx(1000.3133, abs=1e-3)
        assert found["large"][1].isfinite().all()
        assert found["half"][0] == pytest.approx(1000.3133, abs=1e-3)
        assert found["ignored"][0] == 0 and not found["ignored"][1].any()
        assert found["target"].startswith(f"targets must lie from 0 to {4 * n - 1}, got {4 * n}")
        assert found["token"].startswith(f"tokens must lie from 0 to {4 * n - 1}, got -1")


def test_ranks_in_one_process_do_what_real_ones_do():
    real = run_ranks(apply_operators, 2)
    with ranks_here(2) as deal:
        for name in OPERATORS:
            x = deal(10.0**rank * torch.arange(1.0, 5.0).view(1, 4, 1) for rank in range(2))
            x.requires_grad_()
            y = getattr(sharding, name)(x)
            y.backward(deal(torch.full(tuple(y.shape), rank + 1.0) for rank in range(2)))
            found = zip(on_each_rank(y), on_each_rank(x.grad), strict=True)
            assert [(a.flatten().tolist(), b.flatten().tolist()) for a, b in found] == [
                rank[name] for rank in real
            ]
    assert not dist.is_initialized()


def test_dealing_takes_one_shard_per_rank():
    with ranks_here(3) as deal, pytest.raises(ValueError, match="one tensor per rank, 3, got 2"):
        deal([torch.ones(1)] * 2)
