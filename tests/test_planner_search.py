"""The search against trying everything, and what it says about layouts that lose."""

import itertools
import pickle
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import parlab as pl
from parlab.planner.layout import refusal

HGX = pl.cluster("hgx-h100")


def divisors(n):
    return [d for d in range(1, n + 1) if n % d == 0]


def everything(config, cluster, sequence, batch, flash=True):
    """Every Layout that no rule refuses, by trying all degrees, with its Estimate."""
    n = cluster.n_gpus
    ways = ["none", "full"] + ([] if flash else ["selective"])
    ways += ["per-op"] if config.experts == 1 else []
    degrees = [
        d for d in itertools.product(divisors(n), repeat=4) if n == d[0] * d[1] * d[2] * d[3]
    ]
    for (dp, tp, pp, cp), ep, b, v, zero, replicas, schedule, how, cut in itertools.product(
        degrees,
        divisors(config.experts),
        divisors(batch),
        divisors(config.layers),
        range(4),
        divisors(n),
        ("1F1B", "ZB-H1"),
        ways,
        (False, True),
    ):
        # These change nothing, or are the same layout by another name.
        if dp * cp == 1 and zero or replicas > 1 and replicas == dp * cp:
            continue
        if tp == 1 and cut or pp == 1 and schedule == "ZB-H1":
            continue
        try:
            layout = pl.Layout(
                dp=dp,
                tp=tp,
                pp=pp,
                cp=cp,
                ep=ep,
                zero=zero,
                replicas=replicas,
                micro_batch=b,
                chunks=v,
                schedule=schedule,
                recompute=how,
                sequence_parallel=cut,
            )
        except ValueError:
            continue
        if not refusal(config, n, layout, sequence, batch):
            yield layout, pl.estimate(config, cluster, layout, sequence, batch, flash=flash)


def small(layers, heads, kv_heads, experts):
    more = {"experts": experts, "active_experts": min(2, experts)} if experts > 1 else {}
    return pl.ModelConfig(
        layers=layers,
        hidden=64 * heads,
        heads=heads,
        kv_heads=kv_heads,
        vocab=1024,
        positions=None,
        **more,
    )


@given(
    layers=st.sampled_from([2, 4]),
    heads=st.sampled_from([2, 4]),
    experts=st.sampled_from([1, 2]),
    n_gpus=st.sampled_from([1, 2, 4]),
    batch=st.sampled_from([2, 4, 6]),
    flash=st.booleans(),
    room=st.floats(0, 1),
)
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_a_search_finds_what_trying_everything_finds(
    layers, heads, experts, n_gpus, batch, flash, room
):
    config = small(layers, heads, heads, experts)
    node = replace(HGX, gpus_per_node=min(2, n_gpus), n_nodes=max(1, n_gpus // 2))
    tried = list(everything(config, node, 256, batch, flash))
    peaks = sorted(made.peak_bytes for _, made in tried)
    # A card on which some layouts fit, so that memory decides too.
    usable = int(peaks[int(room * (len(peaks) - 1))])
    node = replace(node, gpu=replace(node.gpu, usable_bytes=usable, name=f"card-{usable}"))
    found = pl.search(config, node, 256, batch, flash=flash)
    assert found.considered == len(tried)
    fitting = [made for _, made in tried if made.peak_bytes <= usable]
    best = min(made.seconds for made in fitting)
    assert found.best.seconds == pytest.approx(best, rel=1e-9)
    assert found.best.fits
    ties = {made.layout for made in fitting if made.seconds <= 1.02 * found.best.seconds}
    assert {made.layout for made in found.near_ties} == ties
    front = {
        (made.seconds, made.peak_bytes)
        for made in fitting
        if not any(
            other.seconds <= made.seconds * (1 + 1e-12)
            and other.peak_bytes <= made.peak_bytes
            and (other.seconds < made.seconds * (1 - 1e-12) or other.peak_bytes < made.peak_bytes)
            for other in fitting
        )
    }
    ours = [(made.seconds, made.peak_bytes) for made in found.front]
    assert len(ours) == len({peak for _, peak in front})
    for (seconds, peak), (right, same) in zip(sorted(ours), _fastest_of_each(front), strict=True):
        assert (seconds, peak) == (pytest.approx(right, rel=1e-9), same)


def _fastest_of_each(front):
    """Of equal peaks the fastest, by time."""
    fastest = {}
    for seconds, peak in sorted(front):
        fastest.setdefault(peak, seconds)
    return sorted((seconds, peak) for peak, seconds in fastest.items())


def test_a_search_of_70b_on_512_gpus_considers_more_than_300000_layouts():
    found = pl.search(pl.model("llama-3-70b"), replace(HGX, n_nodes=64), 8192, 1024)
    assert found.considered >= 300_000
    assert found.candidates < found.considered / 100
    assert found.best.fits and found.best.mfu > 0.35
    assert all(a.seconds <= b.seconds for a, b in itertools.pairwise(found.near_ties))


def test_70b_does_not_fit_on_eight_80_gb_cards_at_all():
    found = pl.search(pl.model("llama-2-70b"), HGX, 4096, 8)
    # 16 bytes x 69e9 / 8 = 138 GB of states alone.
    assert found.best is None and found.near_ties == [] and found.front == []
    said = found.why_not(pl.Layout(dp=8, zero=3))
    assert said.startswith("Needs ") and "no single change makes it fit" in said


def test_a_layout_outside_the_space_may_fit_where_none_of_the_search_does():
    found = pl.search(pl.model("llama-2-70b"), HGX, 4096, 8, most_tp=1, most_cp=1)
    assert found.best is None
    roomy = replace(HGX, gpu=replace(HGX.gpu, usable_bytes=10**12, name="roomy"))
    whole = pl.search(pl.model("llama-2-70b"), roomy, 4096, 8)
    whole.best = None
    assert whole.why_not(pl.Layout(dp=8, zero=3)) == (
        "It fits, though no layout that was searched does."
    )


@pytest.fixture(scope="module")
def found():
    config = replace(pl.model("llama-3-70b"), kv_heads=64)
    return pl.search(config, replace(HGX, n_nodes=8), 8192, 64)


def test_a_broken_rule_is_the_first_reason(found):
    assert found.why_not(pl.Layout(dp=3)) == (
        "Not possible: dp x tp x pp x cp must be the 64 GPUs, got 3 x 1 x 1 x 1."
    )


def test_a_layout_that_needs_too_much_says_which_one_change_would_fit(found):
    said = found.why_not(pl.Layout(dp=8, tp=8, zero=1, sequence_parallel=True))
    need = float(said.split("Needs ")[1].split(" GB")[0])
    assert need > 84.9 and "the card has 84.9 GB" in said and "would fit" in said
    hint = said.split(": ")[1]
    assert "ZeRO-3" in hint
    layout = pl.Layout(dp=8, tp=8, zero=3, sequence_parallel=True)
    assert pl.estimate(found.best.job.config, found.best.job.cluster, layout, 8192, 64).fits


def test_tensor_parallelism_across_nodes_is_named_with_its_cost(found):
    said = found.why_not(pl.Layout(dp=4, tp=16, zero=3, sequence_parallel=True))
    assert "slower than the best: tensor parallel takes" in said
    assert "TP 16 crosses the node" in said and "per micro-batch" in said


@pytest.mark.parametrize(
    "layout, takes",
    [
        (
            pl.Layout(dp=8, tp=4, cp=2, zero=3, sequence_parallel=True),
            "work beside collectives takes",
        ),
        (pl.Layout(tp=4, pp=8, cp=2, sequence_parallel=True), "head and loss take"),
        (pl.Layout(dp=32, cp=2, zero=1), "matmul takes"),
    ],
)
def test_the_item_that_costs_most_is_named_in_a_sentence(layout, takes):
    found = pl.search(pl.model("llama-3-8b"), replace(HGX, n_nodes=8), 8192, 64)
    assert f" slower than the best: {takes} " in found.why_not(layout)


def test_the_best_has_no_reason(found):
    assert found.why_not(found.best.layout) == "It is the best, or as fast."


def test_explain_names_the_winner_and_what_costs_the_other(found):
    job = found.best.job
    other = pl.estimate(
        job.config, job.cluster, pl.Layout(dp=2, tp=8, pp=4, zero=1, recompute="full"), 8192, 64
    )
    for pair in ((found.best, other), (other, found.best)):
        text = pl.explain(*pair)
        assert text.startswith(f"{found.best.layout} wins: ")
        assert "more:\n- " in text and "Peak memory: " in text
        assert len(text.splitlines()) <= 6


def test_explain_says_that_one_does_not_fit(found):
    job = found.best.job
    fat = pl.estimate(job.config, job.cluster, pl.Layout(dp=64), 8192, 64)
    text = pl.explain(fat, found.best)
    assert text.startswith(f"{found.best.layout} wins: it needs ")
    assert "too much, most of it optimizer" in text


def test_explain_knows_a_job_by_what_it_is(found):
    job, layout = found.best.job, pl.Layout(dp=32, tp=2, zero=3)
    made = pl.estimate(job.config, job.cluster, layout, np.int64(8192), np.int64(64))
    assert made.job is not job
    for each in (made, pickle.loads(pickle.dumps(made))):
        assert each == made and hash(each.job) == hash(job)
        assert pl.explain(found.best, each).startswith(f"{found.best.layout} wins: ")


def test_a_job_from_another_process_is_hashed_anew(found):
    job = pickle.loads(pickle.dumps(found.best.job))
    object.__setattr__(job, "_hash", 0)  # as there, where text has other hashes
    assert hash(pickle.loads(pickle.dumps(job))) == hash(found.best.job)


def test_explain_refuses_estimates_of_different_jobs(found):
    other = pl.estimate(pl.model("gpt2"), HGX, pl.Layout(dp=8), 1024, 8)
    with pytest.raises(ValueError, match="two jobs"):
        pl.explain(found.best, other)
    with pytest.raises(TypeError, match="compares two Estimates"):
        pl.explain(found.best, "x")


def test_finalists_are_timed_by_simulation(found):
    assert 1 <= len(found.finalists) <= 5
    for seconds, made in found.finalists:
        assert seconds == made.simulated_seconds
        assert seconds == pytest.approx(made.seconds, rel=0.1)


@pytest.mark.parametrize("n_nodes", [1, 125_000])
def test_a_world_of_a_million_gpus_is_answered(n_nodes):
    config = pl.model("llama-3-405b")
    found = pl.search(config, replace(HGX, n_nodes=n_nodes), 8192, 16 * max(n_nodes, 1))
    assert (found.best is None) == (n_nodes == 1)


def test_one_gpu_is_a_cluster_too():
    one = replace(HGX, gpus_per_node=1)
    found = pl.search(pl.model("gpt2"), one, 1024, 8)
    assert found.best.layout.world == 1
    assert found.best.layout.recompute == "none"


def test_degrees_can_be_bounded():
    found = pl.search(pl.model("llama-3-8b"), HGX, 8192, 8, most_cp=1, most_tp=2)
    assert {made.layout.cp for made in found.near_ties} == {1}
    assert max(made.layout.tp for made in found.front) <= 2
    with pytest.raises(ValueError, match="most_cp must be an int of at least 1"):
        pl.search(pl.model("llama-3-8b"), HGX, 8192, 8, most_cp=0)


def test_too_many_gpus_are_refused():
    with pytest.raises(ValueError, match="n_gpus must be an int from 1 to 1000000"):
        pl.search(pl.model("gpt2"), replace(HGX, n_nodes=10**6), 1024, 8)
