"""The small GPT: its size by formula, its blocks against torch's own, its loss at the edges."""

import functools
import math
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from parlab.distributed import compat, gpt
from parlab.distributed.gpt import GPT, GPT2_SMALL, IGNORE, TINY, GPTConfig, token_batch, token_loss

WIDE = GPTConfig(vocab=50, layers=2, hidden=48, heads=6, sequence=8)
CONFIGS = {
    "tiny": TINY,
    "own head": replace(TINY, tied=False),
    "grouped": replace(WIDE, kv_heads=2),
    "one head of keys": replace(WIDE, kv_heads=1),
    "narrow MLP": replace(WIDE, ffn=20),
}


class Calls(TorchDispatchMode):
    """Names of the operators that run inside."""

    def __init__(self):
        super().__init__()
        self.names = []
        self.count = self.names.count

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))


def same(a, b):
    """Equal up to the rounding of a few float64 sums of numbers near 1."""
    return torch.allclose(a, b, rtol=0, atol=1e-13)


def test_choices_are_read_without_regard_to_case():
    config = GPTConfig(
        vocab=8, layers=1, hidden=4, heads=1, sequence=2, attention="Explicit", recompute="Full"
    )
    assert (config.attention, config.recompute) == ("explicit", "full")


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_the_formula_counts_the_parameters_that_the_module_has(config):
    assert sum(parameter.numel() for parameter in GPT(config).parameters()) == config.n_params


def test_gpt2_small_has_its_published_number_of_parameters():
    with compat.fake_tensors():
        model = GPT(GPT2_SMALL)
    assert sum(parameter.numel() for parameter in model.parameters()) == 124_439_808
    assert GPT2_SMALL.n_params == 124_439_808
    assert replace(GPT2_SMALL, tied=False).n_params == 124_439_808 + 50257 * 768


@pytest.mark.parametrize("attention", ["fused", "explicit"])
def test_a_block_equals_torchs_own_encoder_layer(attention):
    block = gpt.Block(replace(WIDE, attention=attention)).double()
    theirs = nn.TransformerEncoderLayer(
        48, 6, 192, dropout=0, activation=functools.partial(F.gelu, approximate="tanh"),
        batch_first=True, norm_first=True, dtype=torch.float64,
    )  # fmt: skip
    q, k, v = block.attention.q, block.attention.k, block.attention.v
    theirs.load_state_dict(
        {
            "self_attn.in_proj_weight": torch.cat([q.weight, k.weight, v.weight]),
            "self_attn.in_proj_bias": torch.cat([q.bias, k.bias, v.bias]),
            **{f"self_attn.out_proj.{k}": v for k, v in block.attention.o.state_dict().items()},
            **{f"linear1.{k}": v for k, v in block.mlp.up.state_dict().items()},
            **{f"linear2.{k}": v for k, v in block.mlp.down.state_dict().items()},
            **{f"norm1.{k}": v for k, v in block.attention_norm.state_dict().items()},
            **{f"norm2.{k}": v for k, v in block.mlp_norm.state_dict().items()},
        }
    )
    x = torch.randn(3, 8, 48, dtype=torch.float64)
    mask = nn.Transformer.generate_square_subsequent_mask(8, dtype=torch.float64)
    assert same(block(x), theirs(x, src_mask=mask))


@pytest.mark.parametrize("attention", ["fused", "explicit"])
def test_grouped_heads_equal_full_heads_with_repeated_keys_and_values(attention):
    grouped = GPT(replace(WIDE, kv_heads=2, attention=attention)).double()
    full = GPT(replace(WIDE, attention=attention)).double()
    weights = grouped.state_dict()
    for name, tensor in weights.items():
        if ".attention.k." in name or ".attention.v." in name:
            by_head = tensor.unflatten(
                0, (2, 8)
            )  # heads 0, 1, 2 share the first, 3, 4, 5 the second
            weights[name] = by_head[[0, 0, 0, 1, 1, 1]].flatten(0, 1)
    full.load_state_dict(weights)
    tokens, _ = token_batch(WIDE, 3)
    assert same(grouped(tokens), full(tokens))


def test_ranks_that_hold_some_heads_each_add_up_to_the_whole():
    whole = gpt.Attention(replace(WIDE, kv_heads=2)).double()
    x = torch.randn(2, 8, 48, dtype=torch.float64)
    total = whole.o.bias.clone()  # once, not once a rank
    for rank in (0, 1):
        part = gpt.Attention(replace(WIDE, kv_heads=2)).double()
        for name in ("q", "k", "v"):
            ours, theirs = getattr(part, name), getattr(whole, name)
            ours.weight = nn.Parameter(theirs.weight.chunk(2)[rank])
            ours.bias = nn.Parameter(theirs.bias.chunk(2)[rank])
        part.o.weight = nn.Parameter(whole.o.weight.chunk(2, dim=1)[rank])
        part.o.bias = nn.Parameter(torch.zeros(48, dtype=torch.float64))
        total = total + part(x)
    assert same(total, whole(x))


@pytest.mark.parametrize("attention", ["fused", "explicit"])
def test_no_position_sees_a_later_one(attention):
    model = GPT(replace(TINY, attention=attention)).double()
    tokens, _ = token_batch(TINY, 1)
    changed = tokens.clone()
    changed[0, 9] += 1
    differs = (model(tokens) != model(changed)).any(-1)[0]
    assert differs.tolist() == [False] * 9 + [True] * 7


def test_the_seed_decides_the_weights():
    first, again, other = (GPT(TINY, seed).state_dict() for seed in (0, 0, 1))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["tokens.weight"], other["tokens.weight"])
    model = GPT(replace(WIDE, layers=8, hidden=120))
    block = model.blocks[7]
    # The deviation of 14,400 and more draws is known to 1%.
    assert block.attention.q.weight.std().item() == pytest.approx(0.02, rel=0.03)
    assert block.attention.o.weight.std().item() == pytest.approx(0.02 / 4, rel=0.03)
    assert block.mlp.down.weight.std().item() == pytest.approx(0.02 / 4, rel=0.03)
    assert block.attention.k.bias.abs().max() == 0 and block.mlp_norm.weight.min() == 1


@pytest.mark.parametrize("attention", ["fused", "explicit"])
def test_dropout_acts_in_training_only_and_explicit_attention_has_it_too(attention):
    config = replace(TINY, attention=attention)
    model, without = GPT(replace(config, dropout=0.5)), GPT(config)
    tokens, _ = token_batch(config, 2)
    torch.manual_seed(0)
    assert not torch.equal(model(tokens), model(tokens))
    assert torch.equal(model.eval()(tokens), without(tokens))


@pytest.mark.parametrize("attend", [gpt.attend_fused, gpt.attend_explicitly])
def test_attention_drops_its_weights(attend):
    torch.manual_seed(0)
    q, k = torch.randn(2, 1, 1, 200, 4)
    ones = torch.ones(1, 1, 200, 4)
    assert torch.allclose(attend(q, k, ones, 0.0), ones)  # weights of one position sum to 1
    dropped = attend(q, k, ones, 0.5)
    assert set(dropped[0, 0, 0].tolist()) <= {0.0, 2.0}  # position 0 has the single weight 1
    assert dropped.std() > 0.1
    assert dropped.mean().item() == pytest.approx(1, abs=0.1)


def test_dropout_keeps_the_mean_and_blocks_the_gradient_of_what_it_drops():
    torch.manual_seed(0)
    x = torch.ones(100_000, requires_grad=True)
    kept = gpt.drop(x, 0.25, True)
    kept.sum().backward()
    assert set(kept.tolist()) == {0.0, kept.max().item()}
    assert kept.max().item() == pytest.approx(4 / 3)
    assert kept.mean().item() == pytest.approx(1, abs=0.01)  # five deviations of the mean
    assert torch.equal(x.grad, kept.detach())


@pytest.mark.parametrize("attention", ["fused", "explicit"])
@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recomputation_changes_neither_the_loss_nor_any_gradient(recompute, dropout, attention):
    config = replace(WIDE, kv_heads=2, dropout=dropout, attention=attention)
    tokens, targets = token_batch(config, 3)
    results = []
    for choice in ("none", recompute):
        model = GPT(replace(config, recompute=choice))
        torch.manual_seed(0)  # the same elements are dropped
        loss = token_loss(model(tokens), targets)
        loss.backward()
        results.append([loss, *(parameter.grad for parameter in model.parameters())])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


@pytest.mark.parametrize(
    ("recompute", "attentions", "mlps"), [("none", 1, 1), ("selective", 2, 1), ("full", 2, 2)]
)
def test_what_is_recomputed_runs_twice_in_training_and_once_without(recompute, attentions, mlps):
    block = gpt.Block(replace(WIDE, attention="explicit", recompute=recompute))
    for needs_gradient in (True, False):
        with Calls() as calls, torch.set_grad_enabled(needs_gradient):
            y = block(torch.ones(2, 8, 48))
            if needs_gradient:
                y.sum().backward()
        found = calls.count("aten::_softmax"), calls.count("aten::gelu")
        assert found == ((attentions, mlps) if needs_gradient else (1, 1))


def test_recomputation_leaves_the_names_of_the_parameters():
    names = [
        list(GPT(replace(TINY, recompute=choice)).state_dict())
        for choice in ("none", "selective", "full")
    ]
    assert names[0] == names[1] == names[2]


def test_the_loss_is_the_mean_over_the_targets_that_count():
    logits = torch.zeros(2, 3, 8)
    logits[1] = 5.0  # a constant changes nothing
    targets = torch.tensor([[1, 2, IGNORE], [7, IGNORE, IGNORE]])
    assert token_loss(logits, targets).item() == pytest.approx(math.log(8))
    assert token_loss(logits, targets, "sum").item() == pytest.approx(3 * math.log(8))


def test_a_batch_in_which_nothing_counts_has_loss_and_gradients_zero():
    for rows, lengths in ((2, [0, 0]), (0, None)):
        model = GPT(TINY)
        tokens, targets = token_batch(TINY, rows, lengths=lengths)
        loss = token_loss(model(tokens), targets)
        loss.backward()
        assert loss.item() == 0
        assert all(parameter.grad.abs().max() == 0 for parameter in model.parameters())


def test_a_sum_over_many_tokens_keeps_its_digits_in_bfloat16():
    logits = torch.zeros(1, 5000, 8, dtype=torch.bfloat16)
    targets = torch.zeros(1, 5000, dtype=torch.int64)
    assert token_loss(logits, targets, "sum").item() == pytest.approx(5000 * math.log(8), rel=1e-5)


def test_targets_are_the_next_tokens_up_to_each_rows_length():
    tokens, targets = token_batch(TINY, 3, seed=5, lengths=[16, 1, 0])
    assert torch.equal(tokens, token_batch(TINY, 3, seed=5)[0])
    assert torch.equal(targets[0, :-1], tokens[0, 1:])
    assert (targets != IGNORE).sum(1).tolist() == [16, 1, 0]
    assert not torch.equal(tokens, token_batch(TINY, 3, seed=6)[0])


def test_the_model_learns_the_batch():
    model, (tokens, targets) = GPT(TINY), token_batch(TINY, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(30):
        optimizer.zero_grad()
        loss = token_loss(model(tokens), targets)
        loss.backward()
        optimizer.step()
    assert loss.item() < math.log(64) / 4  # a model that knows nothing has ln 64


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"heads": 5}, "heads must divide hidden, got heads 5 and hidden 32"),
        ({"kv_heads": 3}, "kv_heads must divide heads, got kv_heads 3 and heads 4"),
        ({"layers": 0}, "layers must be an int of at least 1, got 0"),
        ({"kv_heads": 0}, "kv_heads must be an int of at least 1, got 0"),
        ({"dropout": 1.0}, "dropout must be below 1, got 1.0"),
        ({"dropout": float("nan")}, "dropout must be a finite number"),
        ({"attention": "flash"}, "attention must be one of fused, explicit"),
        ({"recompute": "some"}, "recompute must be one of none, selective, full, got 'some'"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_a_shape_that_cannot_be_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        replace(TINY, **change)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: GPT(TINY)(torch.zeros(1, 17, dtype=int)), "may have 16 positions, got 17"),
        (lambda: token_batch(TINY, 2, lengths=[1]), "one number per row, 2, got 1"),
        (lambda: token_batch(TINY, 1, lengths=[17]), "lengths must be an int from 0 to 16, got 17"),
        (
            lambda: token_loss(torch.zeros(1, 1, 2), torch.zeros(1, 1, dtype=int), "max"),
            "reduction",
        ),
    ],
    ids=["positions", "rows", "length", "reduction"],
)
def test_other_bad_arguments_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
