"""Expert parallelism between real processes, against the whole layer and by counted bytes."""

from functools import partial

import numpy as np
import pytest
import torch

from parlab.distributed.agreement import TOLERANCE
from parlab.distributed.experts import ExpertLayer, check_experts
from parlab.distributed.launch import RankError, run_ranks
from parlab.expert_parallel.layer import expert_layer
from parlab.expert_parallel.load import copies_between

HIDDEN, EXPERTS = 8, 8
CASES = {
    "1 rank": (1, 1, {}),
    "2 ranks, whole experts on each": (2, 1, {}),
    "2 ranks, one group": (2, 2, {"active": 1, "tokens": 1}),  # some rank may get no token
    "4 ranks, 2 groups": (4, 2, {"tokens": 9}),
    "4 ranks, one group": (4, 4, {"active": 8, "tokens": 3}),
    "3 ranks, uneven ffn": (3, 3, {"experts": 6, "ffn": 5}),
}


def test_the_whole_layer_is_the_simulated_one():
    rng = np.random.default_rng(0)
    router, x, dz = rng.normal(size=(5, 4)), *rng.normal(size=(2, 7, 5))
    first, second = rng.normal(size=(4, 5, 6)), rng.normal(size=(4, 6, 5))
    layer = ExpertLayer(5, 6, 4, 2).double()
    with torch.no_grad():
        layer.router.copy_(torch.tensor(router.T))
        layer.up.copy_(torch.tensor(first.swapaxes(1, 2)))
        layer.down.copy_(torch.tensor(second.swapaxes(1, 2)))
    inputs = torch.tensor(x, requires_grad=True)
    output = layer(inputs)
    (output * torch.tensor(dz)).sum().backward()
    ours = [output.detach(), inputs.grad, layer.router.grad.T]
    ours += [layer.up.grad.mT, layer.down.grad.mT]
    for theirs, array in zip(expert_layer(x, router, first, second, dz, 2), ours, strict=True):
        np.testing.assert_allclose(array.numpy(), theirs, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("n, ep, options", CASES.values(), ids=CASES)
def test_loss_output_and_every_gradient_are_those_of_the_whole_layer(n, ep, options):
    runs = run_ranks(partial(check_experts, ep, hidden=HIDDEN, **options), n)
    for run in runs:
        assert set(run.differences) == {"loss", "output", "x", "router", "up", "down"}
        assert max(run.differences.values()) < TOLERANCE
        assert run.calls == {("forward", "all_to_all"): 3, ("backward", "all_to_all"): 2}

    experts = options.get("experts", EXPERTS)
    for first in range(0, n, ep):  # each group by itself
        group = runs[first : first + ep]
        between = copies_between([run.chosen for run in group], experts)
        for rank, run in enumerate(group):
            row = HIDDEN * 8
            leaving = int(between[rank].sum() - between[rank, rank]) * row
            coming = int(between[:, rank].sum() - between[rank, rank]) * row
            assert run.sent == {
                ("forward", "counts"): (ep - 1) * experts // ep * 8,
                ("forward", "dispatch"): leaving,
                ("forward", "combine"): coming,
                ("backward", "dispatch"): leaving,
                ("backward", "combine"): coming,
            }


def test_a_mean_over_the_expert_data_group_is_ep_times_too_large_pytorch_160285():
    for run in run_ranks(partial(check_experts, 2, recipe="mean over the group"), 4):
        assert run.ratios["up"] == pytest.approx(2, rel=1e-12)
        assert run.ratios["down"] == pytest.approx(2, rel=1e-12)
        assert run.differences["router"] < TOLERANCE


@pytest.mark.parametrize("recipe", ["mean over all ranks", "none"])
def test_experts_that_are_averaged_like_the_rest_or_not_at_all_are_wrong(recipe):
    for run in run_ranks(partial(check_experts, 2, recipe=recipe), 4):
        assert run.differences["up"] > 1e-3
        assert run.differences["down"] > 1e-3
        assert run.differences["router"] < TOLERANCE  # and nothing failed


@pytest.mark.parametrize(
    "n, ep, options, message",
    [
        (3, 2, {}, "world size must be a multiple of the 2 ranks, got 3"),
        (2, 2, {"experts": 3}, "experts must be a multiple of the 2 ranks, got 3"),
        (1, 1, {"active": 9}, "active must be an int from 1 to 8, got 9"),
        (1, 1, {"recipe": "maen"}, "recipe must be one of right, mean over the group"),
        (1, 0, {}, "ep must be an int of at least 1, got 0"),
    ],
    ids=str,
)
def test_bad_input_is_named(n, ep, options, message):
    with pytest.raises(RankError, match=message):
        run_ranks(partial(check_experts, ep, **options), n)
