"""Context parallelism on real processes: the whole model's gradients, and the formula's bytes."""

from dataclasses import replace

import pytest

import parlab as pl
from parlab.distributed import context
from parlab.distributed.agreement import TOLERANCE
from parlab.distributed.context import check_context, count_context
from parlab.distributed.gpt import GPT, TINY
from parlab.distributed.launch import RankError, run_ranks


def worst(ranks):
    return max(max(differences.values()) for differences in ranks)


@pytest.mark.parametrize(
    "n, kv_heads, balanced",
    [(1, None, True), (2, None, True), (3, 2, True), (4, 1, True), (2, 1, False), (4, 2, False)],
)
def test_loss_and_every_gradient_are_those_of_the_whole_sequence(n, kv_heads, balanced):
    found = run_ranks(check_context, n, args=(2, 32, 4, kv_heads, 24, 2, balanced))
    # Loss, logits, embeddings of tokens and positions, last norm, and 16 of each block.
    assert {len(rank) for rank in found} == {2 + 2 + 2 + 2 * 16}
    assert worst(found) < TOLERANCE


@pytest.mark.parametrize("n, kv_heads, rows", [(2, None, 1), (4, 2, 3)])
@pytest.mark.parametrize("balanced", [True, False])
def test_every_rank_sends_the_bytes_of_the_formula(n, kv_heads, rows, balanced):
    counters = run_ranks(count_context, n, args=(2, 32, 4, kv_heads, 16, rows, balanced))
    config = pl.ModelConfig(layers=2, hidden=32, heads=4, kv_heads=kv_heads, vocab=32)
    formula = pl.context_parallel_traffic(
        config, rows, sequence=16, cp=n, n_layers=2, element_bytes=8, grad_bytes=8
    )
    for counter in counters:
        for phase in ("forward", "backward"):
            expected = formula.only(phase=phase)
            assert counter.count("send", phase) == expected.count
            assert counter.bytes("send", phase) == expected.bytes_per_rank
        assert {call.op for call in counter.calls if call.phase == "after"} == {"all_reduce"}
        assert {call.op for call in counter.calls if call.phase != "after"} == {"send"}


def test_a_model_with_dropout_is_refused():
    with pytest.raises(ValueError, match="dropout must be 0 here, got 0.1"):
        context.ContextGPT(GPT(replace(TINY, dropout=0.1)))


def test_tokens_that_cannot_be_dealt_out_are_refused_on_the_rank():
    with pytest.raises(RankError, match="2 cp must divide the sequence of 18"):
        run_ranks(check_context, 4, args=(1, 32, 4, None, 18))
