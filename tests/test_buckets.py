"""DDP's buckets against what torch groups, and laws of the overlap with backward."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import parlab as pl
from parlab.buckets import Overlap
from parlab.panels.ddp_overlap import BUCKETS_MIB, MODELS, _gradients, ddp_overlap
from parlab.units import MIB

KIB = 1024
# Recorded by a communication hook of torch 2.13, CPU, two gloo ranks: a chain of nn.Linear of
# these widths, float32, weight before bias. Bucket bytes from the second iteration on.
WIDTHS = [512, 512, 1024, 1024, 512, 256, 256, 10]
RECORDED = {
    None: [2897960, 7350272],
    1 * MIB: [2897960, 4198400, 2101248, 1050624],
    256 * KIB: [273448, 525312, 2099200, 4198400, 2101248, 1050624],
}
sizes = st.lists(st.integers(0, 5000), min_size=1, max_size=30)


def linear_chain(widths):
    return [4 * n for a, b in zip(widths, widths[1:], strict=False) for n in (a * b, b)]


@pytest.mark.parametrize("cap", RECORDED, ids=["default", "1 MiB", "0.25 MiB"])
def test_predicted_buckets_are_those_that_a_hook_recorded(cap):
    buckets = pl.ddp_buckets(linear_chain(WIDTHS), cap)
    assert [bucket.bytes for bucket in buckets] == RECORDED[cap]


@settings(max_examples=60, deadline=None)
@given(sizes=sizes, cap=st.integers(0, 9000), first=st.integers(0, 9000), seed=st.randoms())
def test_buckets_are_those_of_torchs_own_function(sizes, cap, first, seed):
    import torch

    order = list(range(len(sizes)))
    seed.shuffle(order)
    ready = [torch.empty(sizes[i], dtype=torch.int8) for i in order]
    theirs, _ = torch.distributed._compute_bucket_assignment_by_size(ready, [first, cap], [], order)
    ours = pl.ddp_buckets(sizes, cap, first, order=order)
    assert [list(bucket.parameters) for bucket in ours] == theirs


@given(sizes=sizes, cap=st.integers(1, 9000))
def test_every_parameter_is_in_one_bucket_and_only_the_last_stays_below_the_cap(sizes, cap):
    buckets = pl.ddp_buckets(sizes, cap)
    joined = [index for bucket in buckets for index in bucket.parameters]
    assert joined == list(range(len(sizes)))[::-1]
    for bucket in buckets:
        assert bucket.bytes == sum(sizes[index] for index in bucket.parameters)
    for bucket in buckets[:-1]:
        assert bucket.bytes >= cap
        assert bucket.bytes - sizes[bucket.parameters[-1]] < cap  # closed as soon as it was full


def test_the_small_first_bucket_exists_only_with_the_default_cap():
    sizes = [MIB] * 60
    assert [b.bytes // MIB for b in pl.ddp_buckets(sizes)] == [1, 25, 25, 9]
    assert [b.bytes // MIB for b in pl.ddp_buckets(sizes, 25 * MIB)] == [25, 25, 10]
    assert [b.bytes // MIB for b in pl.ddp_buckets(sizes, 25 * MIB, 2 * MIB)] == [2, 25, 25, 8]


def test_a_bucket_overshoots_by_up_to_one_parameter():
    assert [b.bytes for b in pl.ddp_buckets([1000, 99], cap_bytes=100)] == [1099]


def test_no_parameters_make_no_bucket():
    assert pl.ddp_buckets([]) == []


@pytest.mark.parametrize(
    "arguments, options, error, said",
    [
        pytest.param(([1, -1],), {}, ValueError, "parameter_bytes .* at least 0", id="negative"),
        pytest.param(([1.5],), {}, TypeError, "parameter_bytes must be an int", id="half a byte"),
        pytest.param(([1], -1, 1), {}, ValueError, "cap_bytes .* at least 0", id="cap"),
        pytest.param(([1], 5, -1), {}, ValueError, "first_cap_bytes", id="first cap"),
        pytest.param(([1, 2],), {"order": [0, 0]}, ValueError, "each of the 2", id="order"),
    ],
)
def test_buckets_that_cannot_be_are_refused(arguments, options, error, said):
    with pytest.raises(error, match=said):
        pl.ddp_buckets(*arguments, **options)


LINK = pl.Link(5e-6, 50e9)
buckets = st.lists(st.integers(1, 10**9), min_size=1, max_size=20)
seconds = st.floats(0, 10)
links = st.builds(pl.Link, st.floats(0, 1e-3), st.floats(1e6, 1e12))


def ring_seconds(size, n, link):
    """2(N-1) messages of S/N bytes each, written out."""
    return 2 * (n - 1) * (link.latency_s + size / n / link.bandwidth_bytes_per_s)


@given(buckets=buckets, backward=seconds, n=st.integers(1, 100), link=links)
def test_laws_of_the_timeline(buckets, backward, n, link):
    timeline = pl.overlap(buckets, backward, n, link)
    takes = [ring_seconds(size, n, link) for size in buckets]
    slack = 1e-9 * (backward + sum(takes)) + 1e-15  # relative rounding of sums
    assert timeline.communication_seconds == pytest.approx(sum(takes), abs=slack)
    assert timeline.ready[-1] == pytest.approx(backward, abs=slack)
    for i, (ready, start, end) in enumerate(
        zip(timeline.ready, timeline.start, timeline.end, strict=True)
    ):
        free = timeline.end[i - 1] if i else 0
        assert start == max(ready, free) and end - start == pytest.approx(takes[i], abs=slack)
    # Between the last bucket, which nothing can hide, and all of them.
    assert takes[-1] - slack <= timeline.exposed_seconds <= sum(takes) + slack
    assert timeline.total_seconds >= backward
    # Independent: the last end is the longest of all waits for one bucket plus what follows it.
    longest = max(timeline.ready[i] + sum(takes[i:]) for i in range(len(takes)))
    assert timeline.total_seconds == pytest.approx(longest, abs=slack)


@given(size=st.integers(1, 10**9), backward=seconds, n=st.integers(1, 100), link=links)
def test_one_bucket_overlaps_nothing(size, backward, n, link):
    timeline = pl.overlap([size], backward, n, link)
    assert timeline.start == (backward,)
    assert timeline.exposed_seconds == pytest.approx(ring_seconds(size, n, link), abs=1e-9)


@given(buckets=buckets, backward=seconds, n=st.integers(2, 100))
def test_infinite_bandwidth_leaves_latency_only(buckets, backward, n):
    timeline = pl.overlap(buckets, backward, n, pl.Link(5e-6, 1e300))
    latency = 2 * (n - 1) * 5e-6
    assert timeline.communication_seconds == pytest.approx(len(buckets) * latency, abs=1e-12)
    assert timeline.exposed_seconds >= latency - 1e-12


def test_one_rank_has_nothing_to_send():
    assert pl.overlap([100, 200], 1.0, 1, LINK).exposed_seconds == 0


def test_a_slow_link_exposes_all_that_backward_does_not_cover():
    # The link is busy from the first bucket on: 1 s of backward pass until then, 4 x 2 s after it.
    timeline = pl.overlap([10**9] * 4, 4.0, 2, pl.Link(0, 0.5e9))
    assert timeline.end == (3.0, 5.0, 7.0, 9.0) and timeline.exposed_seconds == 5.0


def test_measured_ready_times_replace_the_even_ones():
    timeline = pl.overlap([10**9] * 2, 4.0, 2, pl.Link(0, 1e9), ready=[0.5, 3.5])
    assert timeline.start == (0.5, 3.5) and timeline.exposed_seconds == 0.5
    early = pl.overlap([10**9] * 2, 4.0, 2, pl.Link(0, 1e9), ready=[0.5, 1.0])
    assert early.end == (1.5, 2.5) and early.exposed_seconds == 0  # the rest needs no all-reduce


def test_no_bucket_is_no_communication():
    assert pl.overlap([], 2.0, 8, LINK) == Overlap(2.0, (), (), ())
    assert pl.overlap([], 2.0, 8, LINK).total_seconds == 2.0
    assert pl.overlap([0, 0], 2.0, 8, LINK).ready == (2.0, 2.0)


@pytest.mark.parametrize(
    "arguments, options, error, said",
    [
        pytest.param(([-1], 1, 8, LINK), {}, ValueError, "bucket_bytes", id="negative"),
        pytest.param(([1], -1, 8, LINK), {}, ValueError, "backward_seconds", id="backward"),
        pytest.param(([1], math.nan, 8, LINK), {}, ValueError, "backward_seconds", id="nan"),
        pytest.param(([1], 1, 0, LINK), {}, ValueError, "n_ranks", id="no ranks"),
        pytest.param(([1], 1, 8, 50e9), {}, TypeError, "link must be a Link", id="no link"),
        pytest.param(([1, 2], 1, 8, LINK), {"ready": [1]}, ValueError, "ready", id="few"),
        pytest.param(([1, 2], 1, 8, LINK), {"ready": [1, 0]}, ValueError, "ready", id="backwards"),
    ],
)
def test_timelines_that_cannot_be_are_refused(arguments, options, error, said):
    with pytest.raises(error, match=said):
        pl.overlap(*arguments, **options)


# The panel's models: 12 h^2 + 13 h parameters a layer, two bytes of gradient each.
@pytest.mark.parametrize("model", MODELS)
def test_the_panel_counts_all_gradients_of_its_models(model):
    layers, hidden = MODELS[model]
    parameters = layers * (12 * hidden**2 + 13 * hidden)
    said = ddp_overlap(model, 25, 50, 100).sentence
    assert sum(_gradients(layers, hidden)) == 2 * parameters
    assert f"{pl.format_bytes(2 * parameters)} of bf16 gradients" in said
    assert parameters == pytest.approx(
        float(model[:-1]) * {"M": 1e6, "B": 1e9}[model[-1]], rel=0.02
    )


@pytest.mark.parametrize("model", MODELS)
def test_one_bucket_in_the_panel_exposes_the_whole_ring(model):
    layers, hidden = MODELS[model]
    gradients = 2 * layers * (12 * hidden**2 + 13 * hidden)
    exposed = ring_seconds(gradients, 64, LINK)
    said = ddp_overlap(model, BUCKETS_MIB[-1], 50, 100).sentence
    if gradients <= BUCKETS_MIB[-1] * MIB:
        assert f"leaves {pl.format_seconds(exposed)} (100%) exposed" in said
