"""Bytes, causal work and seconds of context parallelism: by hand, by counting, by event times."""

from math import ceil

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import parlab as pl
from parlab.context_work import BACKWARD_FLOPS, FORWARD_FLOPS
from parlab.distributed import compat

LLAMA_405B = pl.model("llama-3-405b")  # 128 heads of size 128, 8 of keys and values
INFINIBAND = pl.Link(0, 50e9)


def small(heads=4, kv_heads=2, head_dim=8):
    sizes = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
    return pl.ModelConfig(layers=2, hidden=32, vocab=64, **sizes)


def traffic(config=LLAMA_405B, micro_batch=1, **changed):
    return pl.context_parallel_traffic(
        config, micro_batch, **{"sequence": 131_072, "cp": 16, "tp": 8, **changed}
    )


# Bytes


def test_a_hop_of_llama_3_405b_at_128k_on_cp_16_and_tp_8_is_4_mib():
    # Llama 3's layout for long context: 8192 tokens and one key-value head of size 128 a rank.
    hop = 2 * 8192 * 1 * 128 * 2
    assert hop == 4 * 2**20
    items = traffic().items
    assert [(i.tensor, i.phase, i.op, i.count, i.bytes_per_rank) for i in items] == [
        ("keys and values", "forward", "send", 15, 15 * hop),
        ("keys and values", "backward", "send", 15, 15 * hop),
        ("their gradients", "backward", "send", 15, 15 * hop),
    ]


def test_gradients_in_fp32_take_twice_the_bytes_of_bf16_and_recomputation_a_forward_more():
    hops = 15 * 4 * 2**20
    assert traffic(grad_bytes=4).bytes_per_rank == 4 * hops
    assert traffic(recompute=True).bytes_per_rank == 4 * hops
    assert traffic(recompute=True).only(phase="recompute").bytes_per_rank == hops


@pytest.mark.parametrize("cp", [1, 2, 4])
def test_gathering_keys_and_values_sends_what_a_simulated_all_gather_sends(cp):
    config, s, b = small(), 16, 3
    shard = np.zeros((2, b, config.kv_heads, s // cp, 8))  # keys and values in float64
    _, gathered = pl.ring_all_gather([shard] * cp)
    _, scattered = pl.ring_reduce_scatter([np.zeros(shard.size * cp)] * cp)
    found = traffic(
        config, b, sequence=s, cp=cp, tp=1, algorithm="all_gather", element_bytes=8, grad_bytes=8
    )
    assert [item.bytes_per_rank for item in found.items] == [
        gathered[0],
        gathered[0],
        scattered[0],
    ]
    ring = traffic(config, b, sequence=s, cp=cp, tp=1, element_bytes=8, grad_bytes=8)
    assert found.bytes_per_rank == ring.bytes_per_rank


@pytest.mark.parametrize("cp, tp", [(1, 1), (2, 1), (2, 2), (4, 1)])
def test_ulysses_sends_what_changes_its_rank_when_tokens_are_dealt_out_by_heads(cp, tp):
    config, s, b = small(heads=8, kv_heads=4), 16, 2
    by_token = np.repeat(np.arange(cp), s // cp)[:, None]
    elements = 0
    for heads in (8 // tp, 4 // tp, 4 // tp, 8 // tp):  # queries, keys, values and the output
        by_head = np.repeat(np.arange(cp), heads // cp)[None, :]
        elements += int((by_token != by_head).sum()) * b * config.head_size
    found = traffic(config, b, sequence=s, cp=cp, tp=tp, algorithm="ulysses")
    assert found.only(phase="forward").bytes_per_rank == 2 * elements / cp
    assert found.only(phase="backward").bytes_per_rank == 2 * elements / cp
    assert found.count == 2 * 4


SIZES = st.fixed_dictionaries(
    {
        "sequence": st.integers(1, 50).map(lambda k: 48 * k),
        "cp": st.sampled_from([1, 2, 3, 4, 6, 8]),
        "n_layers": st.integers(1, 5),
        "grad_bytes": st.sampled_from([2, 4]),
        "recompute": st.booleans(),
        "algorithm": st.sampled_from(["ring", "all_gather"]),
    }
)


@given(sizes=SIZES, b=st.integers(1, 4), latency=st.floats(0, 1e-4))
def test_totals_are_sums_and_tp_and_layers_scale_them(sizes, b, latency):
    link = pl.Link(latency, 50e9)
    whole = traffic(small(8, 4), b, **{**sizes, "tp": 1, "link": link})
    for field in ("count", "bytes_per_rank", "latency_s", "transfer_s"):
        assert getattr(whole, field) == sum(getattr(item, field) for item in whole.items)
    assert whole.seconds == pytest.approx(whole.latency_s + whole.transfer_s, rel=1e-12)
    cut = traffic(small(8, 4), b, **{**sizes, "tp": 4})
    assert 4 * cut.bytes_per_rank == whole.bytes_per_rank
    one = traffic(small(8, 4), b, **{**sizes, "tp": 1, "n_layers": 1})
    assert whole.bytes_per_rank == sizes["n_layers"] * one.bytes_per_rank


def test_a_ring_of_16_takes_15_latencies_and_15_transfers():
    found = traffic(link=pl.Link(5e-6, 50e9)).only(phase="forward")
    assert found.latency_s == pytest.approx(15 * 5e-6, rel=1e-12)
    assert found.transfer_s == pytest.approx(15 * 4 * 2**20 / 50e9, rel=1e-12)
    gathered = traffic(link=pl.Link(5e-6, 50e9), algorithm="all_gather").only(phase="forward")
    assert gathered.seconds == pytest.approx(found.seconds, rel=1e-12)


def test_one_rank_sends_nothing():
    for algorithm in ("ring", "all_gather", "ulysses"):
        assert traffic(cp=1, algorithm=algorithm, link=INFINIBAND).seconds == 0


# Who holds what, and whose work it is


@pytest.mark.parametrize("cp", [1, 2, 4, 8])
def test_the_balanced_pieces_are_those_of_torch(cp):
    pieces = [[token for p in own for token in p] for own in pl.context_pieces(48 * cp, cp)]
    assert pieces == compat.torch_context_order(48 * cp, cp)


@given(pieces=st.integers(1, 8), cp=st.integers(1, 9), balanced=st.booleans())
def test_every_token_is_on_one_rank_and_pairs_are_those_of_the_mask(pieces, cp, balanced):
    s = 2 * cp * pieces
    seen = np.tril(np.ones((s, s), bool))
    held = [[t for p in own for t in p] for own in pl.context_pieces(s, cp, balanced=balanced)]
    assert sorted(sum(held, [])) == list(range(s))
    assert [len(own) for own in held] == [s // cp] * cp
    work = pl.causal_work(s, cp, balanced=balanced)
    assert list(work.pairs) == [int(seen[own].sum()) for own in held]
    assert work.total == s * (s + 1) // 2


@given(cuts=st.lists(st.integers(0, 30), min_size=8, max_size=8))
def test_pairs_of_any_ranges_are_counted_as_one_by_one(cuts):
    queries = tuple(range(*sorted(pair)) for pair in (cuts[0:2], cuts[2:4]))
    keys = tuple(range(*sorted(pair)) for pair in (cuts[4:6], cuts[6:8]))
    one_by_one = sum(k <= q for qs in queries for q in qs for ks in keys for k in ks)
    assert pl.causal_pairs(queries, keys) == one_by_one


@pytest.mark.parametrize("cp", [2, 4, 8, 16])
def test_the_last_of_the_ranks_with_one_piece_has_almost_twice_the_mean(cp):
    assert pl.causal_work(131_072, cp).imbalance == 1
    imbalance = pl.causal_work(131_072, cp, balanced=False).imbalance
    assert imbalance == pytest.approx(2 - 1 / cp, rel=1e-4)  # of 1/s at most


def test_flop_of_all_pairs_are_those_of_the_model():
    pairs = pl.causal_work(4096, 8).total
    scores = LLAMA_405B.flops_per_token(4096, causal=True).scores * 4096 / LLAMA_405B.layers
    assert FORWARD_FLOPS * pairs * 128 * 128 == scores


# Seconds


def event_times(hops, busy):
    """When the last rank ends, if each posts its messages at the start of a step and then waits.

    hops: seconds of what travels under each step but the last. busy[rank][step]: its compute.
    A rank gets its next block from the one before it.
    """
    now = [0.0] * len(busy)
    for step in range(len(busy[0])):
        posted = [max(now[r], now[r - 1]) for r in range(len(now))] if step < len(hops) else now
        under = hops[step] if step < len(hops) else 0.0
        now = [max(now[r] + busy[r][step], posted[r] + under) for r in range(len(now))]
    return max(now)


@given(
    cp=st.sampled_from([1, 2, 3, 4, 8]),
    size=st.integers(1, 400),
    bandwidth=st.floats(1e9, 1e12),
    causal=st.booleans(),
    balanced=st.booleans(),
    grad=st.sampled_from([2, 4]),
)
def test_a_ring_takes_as_long_as_ranks_that_wait_for_their_neighbours(
    cp, size, bandwidth, causal, balanced, grad
):
    config, s = small(8, 4), 2 * cp * size
    link, gpu = pl.Link(1e-6, bandwidth), pl.gpu("h100-sxm")
    found = pl.ring_time(
        config, 3, sequence=s, cp=cp, link=link, gpu=gpu, tp=2, causal=causal, balanced=balanced,
        grad_bytes=grad,
    )  # fmt: skip
    n = s // cp
    elements = 2 * 3 * n * 2 * 8  # keys and values: rows, tokens, heads of a rank, head size
    kv, gradient = (1e-6 + elements * each / bandwidth for each in (2, grad))
    pieces = pl.context_pieces(s, cp, balanced=balanced)

    def seconds(rank, owner, flops):
        pairs = pl.causal_pairs(pieces[rank], pieces[owner]) if causal else n * n
        return flops * pairs * 3 * 4 * 8 / (0.4 * gpu.bf16_flop_per_s)

    ranks, steps = range(cp), range(cp)
    forward = [[seconds(r, (r - t) % cp, FORWARD_FLOPS) for t in steps] for r in ranks]
    assert found.phases[0].seconds == pytest.approx(event_times([kv] * (cp - 1), forward), rel=1e-9)

    # Backward goes round the other way; the gradients of the step before travel as well, and in
    # the last step, with nothing else to wait for, they alone.
    backward = [[seconds(r, (r + 1 + t) % cp, BACKWARD_FLOPS) for t in steps] for r in ranks]
    hops = [kv] + [kv + gradient] * (cp - 2) + [gradient] if cp > 1 else []
    expected = event_times(hops, backward[::-1])
    assert found.phases[1].seconds == pytest.approx(expected, rel=1e-9)
    assert found.transfer_s == pytest.approx((cp - 1) * (2 * kv + gradient), rel=1e-9)


@pytest.mark.parametrize("grad", [2, 4])
@pytest.mark.parametrize("causal", [True, False])
def test_hops_are_hidden_from_the_named_number_of_tokens_on_and_not_below(causal, grad):
    gpu, cp = pl.gpu("h100-sxm"), 4
    options = {"causal": causal, "grad_bytes": grad}
    tokens = pl.ring_hides_from(LLAMA_405B, gpu, INFINIBAND, **options)
    for n, hidden in ((2 * ceil(tokens / 2), True), (2 * (tokens // 2) - 2, False)):
        time = pl.ring_time(
            LLAMA_405B, 1, sequence=n * cp, cp=cp, link=INFINIBAND, gpu=gpu, **options
        )
        assert (time.exposed_s == 0) == hidden


def test_without_mask_and_grouping_hops_are_hidden_from_flop_rate_over_bandwidth_on():
    # Liu et al. (2310.01889), section 3: a block of c tokens needs c >= F/B.
    gpu = pl.gpu("a100-80")
    tokens = pl.ring_hides_from(small(4, 4), gpu, pl.Link(0, 300e9), efficiency=1, causal=False)
    assert tokens == ceil(gpu.bf16_flop_per_s / 300e9) == 1040


def test_small_numpy_integers_do_not_wrap_around():
    options = {"link": INFINIBAND, "gpu": pl.gpu("h100-sxm")}
    sizes = {"sequence": 2**20, "cp": 4}
    narrow = {name: np.int32(size) for name, size in sizes.items()}
    expected = pl.ring_time(LLAMA_405B, 2, **sizes, **options)
    assert pl.ring_time(LLAMA_405B, np.int32(2), **narrow, **options) == expected
    assert pl.causal_work(**narrow) == pl.causal_work(**sizes)


# Errors


@pytest.mark.parametrize(
    "call, error, said",
    [
        pytest.param(lambda: traffic(cp=3), ValueError, "cp must divide the sequence", id="cp"),
        pytest.param(
            lambda: traffic(tp=16), ValueError, "tp must divide kv_heads = 8, got 16", id="kv_heads"
        ),
        pytest.param(
            lambda: traffic(algorithm="ulysses", cp=8),  # it divides the 8 of the model
            ValueError,
            "cp must divide the 1 kv_heads of a rank for ulysses, got 8",
            id="ulysses",
        ),
        pytest.param(
            lambda: traffic(algorithm="rings"), ValueError, "did you mean ring", id="algorithm"
        ),
        pytest.param(lambda: traffic(link=50e9), TypeError, "link must be a Link", id="link"),
        pytest.param(
            lambda: traffic().seconds, ValueError, "link must be given for seconds", id="no link"
        ),
        pytest.param(lambda: traffic(None), TypeError, "config must have heads", id="config"),
        pytest.param(
            lambda: traffic(micro_batch=10**400), ValueError, "micro_batch must be", id="huge batch"
        ),
        pytest.param(lambda: traffic(cp=10**7), ValueError, "cp must be an int from 1", id="huge"),
        pytest.param(lambda: traffic().only(phases="forward"), TypeError, "only()", id="only"),
        pytest.param(
            lambda: pl.context_pieces(12, 4), ValueError, "2 cp must divide the sequence", id="2 cp"
        ),
        pytest.param(
            lambda: pl.ring_time(
                small(), 1, sequence=12, cp=4, link=INFINIBAND, gpu=pl.gpu("h100-sxm")
            ),
            ValueError,
            "2 cp must divide the sequence of 12 tokens",
            id="ring_time",
        ),
        pytest.param(
            lambda: pl.ring_time(small(), 1, sequence=8, cp=4, link=None, gpu=pl.gpu("h100-sxm")),
            TypeError,
            "link must be a Link",
            id="ring_time without a link",
        ),
    ],
)
def test_what_cannot_be_is_refused_with_the_rule(call, error, said):
    with pytest.raises(error, match=said.replace("(", r"\(").replace(")", r"\)")):
        call()
