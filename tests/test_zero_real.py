"""ZeRO by hand on real ranks: beside serial AdamW, byte for byte beside the formulas."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import parlab as pl
from parlab.distributed.gpt import GPT, TINY, GPTConfig, token_batch, token_loss
from parlab.distributed.launch import RankError, run_ranks
from parlab.distributed.zero import (
    LEARNING_RATE,
    MixedPrecisionAdamW,
    Zero,
    fill_up,
    filled_up_params,
    held_bytes,
    train,
)

STAGES = (0, 1, 2)
# Sizes that 4 ranks do not divide; those of TINY 3 ranks do not.
UNEVEN = GPTConfig(vocab=61, layers=2, hidden=30, heads=5, sequence=13)


def train_every_stage():
    """{(name of the model, stage, M): ZeroTraining} on this rank."""
    return {
        (name, stage, m): train(stage, micro_batches=m, config=config)
        for name, config, m in (("tiny", TINY, 1), ("tiny", TINY, 3), ("uneven", UNEVEN, 2))
        for stage in STAGES
    }


@pytest.fixture(scope="module", params=(1, 2, 3, 4), ids=lambda n: f"{n} ranks")
def trained(request):
    return run_ranks(train_every_stage, request.param)


def serial(config, rows=12, steps=3):
    """torch's own AdamW on the whole batch, in one process: weights and losses."""
    model = GPT(config).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    tokens, targets = token_batch(config, rows)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = token_loss(model(tokens), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    flat = torch.cat([weight.detach().flatten() for weight in model.parameters()])
    return flat.numpy(), losses


@pytest.fixture(scope="module")
def serially():
    return {"tiny": serial(TINY), "uneven": serial(UNEVEN)}


def test_every_stage_trains_as_serial_adamw_does(trained, serially):
    # float64, of which sums in another order lose the last digits; Adam's division by the root of
    # the variance makes more of them where a gradient is tiny.
    for (name, _, _), training in trained[0].items():
        weights, losses = serially[name]
        assert np.allclose(training.weights, weights, rtol=0, atol=1e-9)
        assert np.allclose(training.losses, losses, rtol=1e-12)
        assert losses[0] - losses[-1] > 0.1  # it did learn


def test_all_ranks_end_with_the_same_bits(trained):
    for of_rank in trained[1:]:
        for case, training in of_rank.items():
            assert np.array_equal(training.weights, trained[0][case].weights)


def sizes(config):
    return [weight.numel() for weight in GPT(config).parameters()]


def padded(config, n):
    """By another route than the code: every size, rounded up."""
    return sum(n * int(np.ceil(size / n)) for size in sizes(config))


def test_a_rank_sends_the_bytes_of_zero_traffic(trained):
    n = len(trained)
    for of_rank in trained:
        for (name, stage, m), training in of_rank.items():
            config = TINY if name == "tiny" else UNEVEN
            # An all-reduce needs no padding; the ring over chunks of unequal size is a model.
            psi = padded(config, n) if stage else config.n_params
            formula = pl.zero_traffic(psi, n, stage, m, weight_bytes=8, grad_bytes=8)
            by_operation = {message.op: message.bytes_per_rank for message in formula.items}
            assert training.sent == pytest.approx(by_operation, rel=1e-15)


def test_stage_2_sends_gradients_in_every_micro_batch_deepspeed_2252():
    # 14 GB of gradients on 8 ranks, 4 micro-batches: 61.25 GB against 24.5 GB, a ratio of 2.5.
    sent = run_ranks(sent_with_four_micro_batches, 2)[0]
    assert sent[2] / sent[1] == 2.5
    assert sent[1] == sent[0]


def sent_with_four_micro_batches():
    return [sum(train(stage, steps=1, micro_batches=4).sent.values()) for stage in STAGES]


def test_collectives_of_a_step_are_one_a_parameter_and_phase(trained):
    parameters = len(sizes(TINY))
    for m in (1, 3):
        none, one, two = (trained[0]["tiny", stage, m].calls for stage in STAGES)
        assert none == {("forward", "all_reduce"): parameters}  # "forward": outside of backward
        assert one == {
            ("forward", "reduce_scatter"): parameters,
            ("forward", "all_gather"): parameters,
        }
        assert two == {
            ("backward", "reduce_scatter"): m * parameters,
            ("forward", "all_gather"): parameters,
        }


def held_by_dtype():
    return {
        (name, dtype, stage): train(stage, steps=1, config=config, dtype=dtype).held
        for name, config in (("tiny", TINY), ("uneven", UNEVEN))
        for dtype in ("float32", "bfloat16")
        for stage in STAGES
    }


@pytest.mark.parametrize("n", [3, 4])
def test_a_rank_holds_the_bytes_of_zero_memory(n):
    recipes = {"float32": "autocast", "bfloat16": "mixed-precision"}
    for of_rank in run_ranks(held_by_dtype, n):
        for (name, dtype, stage), held in of_rank.items():
            config = TINY if name == "tiny" else UNEVEN
            bytes_each = pl.BYTE_RECIPES[recipes[dtype]].arguments
            plain = pl.zero_memory(config.n_params, n, stage, **bytes_each)
            if stage and padded(config, n) != config.n_params:
                filled = pl.zero_memory(padded(config, n), n, stage, **bytes_each)
                # Weights and shards are filled up; a whole gradient is as autograd made it.
                gradients = plain.gradients if stage == 1 else filled.gradients
                expected = (filled.weights, gradients, filled.optimizer)
            else:
                expected = (plain.weights, plain.gradients, plain.optimizer)
            assert (held.weights, held.gradients, held.optimizer) == expected


def test_padding_is_less_than_n_a_parameter():
    assert padded(TINY, 4) == filled_up_params(sizes(TINY), 4) == TINY.n_params
    extra = filled_up_params(sizes(UNEVEN), 4) - UNEVEN.n_params
    assert 0 < extra < 4 * len(sizes(UNEVEN))


@given(st.integers(0, 50), st.integers(1, 9))
def test_fill_up_appends_as_few_zeros_as_make_a_multiple(size, n):
    full = fill_up(torch.ones(size), n)
    assert len(full) % n == 0 <= len(full) - size < n
    assert full.sum() == size


def gradients_alive_during_backward(stage):
    """Whole gradients that exist when each parameter's hooks have run, and after backward."""
    model = GPT(TINY)
    zero = Zero(model.parameters(), MixedPrecisionAdamW, stage=stage)
    alive = []
    for weight in model.parameters():
        weight.register_post_accumulate_grad_hook(
            lambda _: alive.append(sum(w.grad is not None for w in model.parameters()))
        )
    tokens, targets = token_batch(TINY, 2)
    token_loss(model(tokens), targets).backward()
    del zero
    return alive


def test_stage_2_frees_each_whole_gradient_before_the_next_and_stage_1_keeps_all():
    parameters = len(sizes(TINY))
    assert run_ranks(gradients_alive_during_backward, 2, args=(2,))[0] == [0] * parameters
    expected = list(range(1, parameters + 1))
    assert run_ranks(gradients_alive_during_backward, 2, args=(1,))[0] == expected


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_mixed_precision_adamw_is_torchs_adamw_on_a_copy_in_fp32(dtype):
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(7, 5, generator=generator).to(dtype)
    wide = torch.float32 if dtype == torch.bfloat16 else dtype
    ours, theirs = nn.Parameter(start.clone()), nn.Parameter(start.to(wide))
    optimizers = MixedPrecisionAdamW([ours], lr=0.01), torch.optim.AdamW([theirs], lr=0.01)
    for _ in range(10):
        gradient = torch.randn(7, 5, generator=generator).to(dtype)
        kept = gradient.clone()
        ours.grad, theirs.grad = gradient, gradient.to(wide)
        for optimizer in optimizers:
            optimizer.step()
        assert torch.equal(gradient, kept)
    master = optimizers[0].state[ours].get("master", ours)
    assert torch.allclose(master, theirs, rtol=1e-6, atol=0)  # other order of two divisions
    assert torch.equal(ours, master.to(dtype))


def test_without_a_master_copy_small_steps_would_be_lost():
    weight = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    optimizer = MixedPrecisionAdamW([weight], lr=1e-3)
    for _ in range(10):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    # Below 1 bfloat16 has steps of 2^-8 = 0.0039: one step of 0.001 is lost, ten are not.
    assert weight.item() == 1 - 2**-8 * 3
    assert (torch.ones(1, dtype=torch.bfloat16) - 1e-3).item() == 1


def test_a_weight_without_a_gradient_stays_as_it_is():
    weight = nn.Parameter(torch.ones(3))
    MixedPrecisionAdamW([weight]).step()
    assert weight.tolist() == [1, 1, 1]


def test_held_bytes_counts_a_shared_storage_once_and_whole():
    storage = torch.zeros(10)
    views = [nn.Parameter(storage[:3]), nn.Parameter(storage[5:])]
    held = held_bytes(views, torch.optim.SGD(views, lr=0.1))
    assert (held.weights, held.gradients, held.optimizer) == (40, 0, 0)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ((3,), r"stage must be an int from 0 to 2, got 3"),
        ((1, 0), r"rows must be an int of at least 1, got 0"),
        ((1, 12, 0), r"steps must be an int of at least 1, got 0"),
    ],
    ids=str,
)
def test_train_refuses_what_it_cannot_do(arguments, message):
    with pytest.raises(RankError, match=message):
        run_ranks(train, 1, args=arguments)


def zero_of_stage_3():
    Zero(GPT(TINY).parameters(), MixedPrecisionAdamW, stage=3)
    dist.barrier()


def test_zero_by_hand_has_no_stage_3():
    with pytest.raises(RankError, match=r"stage must be an int from 1 to 2, got 3"):
        run_ranks(zero_of_stage_3, 1)
