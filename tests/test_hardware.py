"""Every row of the data sheet has a source and obeys physics; fitted latencies refit."""

import dataclasses
import re
import tomllib
from datetime import date
from pathlib import Path

import numpy as np
import pytest

import parlab.hardware
from parlab.fit import fit_latency_bandwidth
from parlab.hardware import GPU, Cluster, Link, bandwidth_ladder, cluster, gpu, link
from parlab.published import all_reduce_times
from parlab.units import GB, GIB

SHEET = tomllib.loads(
    (Path(parlab.hardware.__file__).parent / "data" / "hardware.toml").read_text(encoding="utf-8")
)
LINKS, GPUS, CLUSTERS = (sorted(SHEET[kind]) for kind in ("links", "gpus", "clusters"))
ROWS = [(kind, name) for kind in SHEET for name in SHEET[kind]]


def test_data_sheet_holds_the_promised_names():
    assert set(GPUS) == {"a100-40", "a100-80", "h100-sxm", "h200", "b200", "t4"}
    assert set(LINKS) == {
        *("nvlink-3", "nvlink-4", "nvlink-5"),
        *("infiniband-200g", "infiniband-400g"),
        *("pcie-3", "pcie-4", "pcie-5"),
    }
    assert set(CLUSTERS) == {"hgx-a100", "hgx-h100", "hgx-h200", "hgx-b200", "t4-host"}


@pytest.mark.parametrize(("kind", "name"), ROWS, ids=[f"{k}-{n}" for k, n in ROWS])
def test_row_names_its_sources_and_their_day(kind, name):
    row = SHEET[kind][name]
    assert date(2026, 1, 1) <= date.fromisoformat(row["as_of"])
    sources = [value for key, value in row.items() if key == "source" or key.endswith("_source")]
    assert sources
    for source in sources:
        assert re.search(r"https://\S+", source) or source.startswith(
            ("published table", "that of")
        )
    loaded = {"links": link, "gpus": gpu, "clusters": cluster}[kind](name)
    assert (loaded.name, loaded.source, loaded.as_of) == (name, row["source"], row["as_of"])


@pytest.mark.parametrize("name", LINKS)
def test_link_states_where_its_latency_comes_from(name):
    wire = link(name)
    assert wire.latency_kind in ("fitted", "cited", "assumed")
    assert wire.latency_source
    assert 1e-7 < wire.latency_s < 1e-4


@pytest.mark.parametrize(
    ("name", "both_ways_gb_per_s"),
    [("nvlink-3", 600), ("nvlink-4", 900), ("nvlink-5", 1800)],
)
def test_nvlink_bandwidth_is_half_of_what_the_vendor_prints(name, both_ways_gb_per_s):
    assert 2 * link(name).bandwidth_bytes_per_s == both_ways_gb_per_s * GB


@pytest.mark.parametrize(("name", "gigatransfers"), [("pcie-3", 8), ("pcie-4", 16), ("pcie-5", 32)])
def test_pcie_bandwidth_is_sixteen_coded_lanes_one_way(name, gigatransfers):
    expected = 16 * gigatransfers * 1e9 * (128 / 130) / 8
    assert link(name).bandwidth_bytes_per_s == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize(("name", "gigabits"), [("infiniband-200g", 200), ("infiniband-400g", 400)])
def test_infiniband_bandwidth_is_its_line_rate(name, gigabits):
    assert link(name).bandwidth_bytes_per_s == gigabits * 1e9 / 8


@pytest.mark.parametrize(("name", "measured_gpu"), [("nvlink-3", "a100"), ("nvlink-4", "h200")])
def test_fitted_latency_is_what_the_measured_table_gives(name, measured_gpu):
    wire = link(name)
    assert wire.latency_kind == "fitted"
    assert wire.latency_source == f"published table all-reduce-{measured_gpu}"
    fit = fit_latency_bandwidth(*zip(*all_reduce_times(measured_gpu), strict=True))
    ring_steps = 2 * (8 - 1)
    assert wire.latency_s == float(f"{fit.latency_s / ring_steps:.3g}")


@pytest.mark.parametrize(
    ("name", "sheet_gb", "reported_gib"),
    [
        ("a100-40", 40, 39.39),
        ("a100-80", 80, 79.25),
        ("h100-sxm", 80, 79.10),
        ("h200", 141, 139.81),
        ("b200", 180, 178.35),
        ("t4", 16, 14.56),
    ],
)
def test_usable_memory_is_what_the_driver_reports_and_not_the_name(name, sheet_gb, reported_gib):
    card = gpu(name)
    assert card.memory_bytes == sheet_gb * GB
    assert round(card.usable_bytes / GIB, 2) == reported_gib
    assert card.usable_bytes < sheet_gb * GIB
    assert type(card.usable_bytes) is int


@pytest.mark.parametrize(
    ("name", "bf16", "fp16"),
    [
        ("a100-40", 312e12, 312e12),
        ("a100-80", 312e12, 312e12),
        ("h100-sxm", 989.4e12, 989.4e12),
        ("h200", 989.4e12, 989.4e12),
        ("b200", 2250e12, 2250e12),
        ("t4", None, 65e12),
    ],
)
def test_peak_rates_are_dense(name, bf16, fp16):
    card = gpu(name)
    assert (card.bf16_flop_per_s, card.fp16_flop_per_s) == (bf16, fp16)
    assert card.bf16_tensor_cores == (bf16 is not None)
    assert card.fp32_flop_per_s < card.fp16_flop_per_s


@pytest.mark.parametrize(
    ("name", "boost_hz"), [("a100-40", 1.41e9), ("a100-80", 1.41e9), ("h100-sxm", 1.98e9)]
)
def test_l1_bandwidth_is_128_bytes_a_clock_in_each_sm(name, boost_hz):
    card = gpu(name)
    expected = card.n_sms * 128 * boost_hz
    assert card.l1_bandwidth_bytes_per_s == pytest.approx(expected, rel=2e-3)


@pytest.mark.parametrize("name", CLUSTERS)
def test_every_rung_of_the_ladder_is_slower_than_the_one_above(name):
    ladder = bandwidth_ladder(cluster(name))
    rates = [rung.bandwidth_bytes_per_s for rung in ladder]
    assert rates == sorted(rates, reverse=True)
    sizes = [rung.size_bytes for rung in ladder if rung.size_bytes is not None]
    assert sizes == sorted(sizes)


def test_ladder_of_an_h100_reaches_from_l1_to_the_network():
    rungs = {rung.name: rung for rung in bandwidth_ladder(cluster("hgx-h100"))}
    assert rungs["L1 / shared memory"].size_bytes == 132 * 256 * 1024
    assert rungs["memory"].bandwidth_bytes_per_s == 3.35e12
    assert rungs["nvlink-4"].bandwidth_bytes_per_s == 9 * rungs["infiniband-400g"][2]


def test_ladder_leaves_out_a_rung_without_a_source():
    assert [rung.name for rung in bandwidth_ladder(cluster("t4-host"))] == ["memory", "pcie-3"]


@pytest.mark.parametrize(
    ("lookup", "name", "found"),
    [
        (link, "NVLink-4", "nvlink-4"),
        (gpu, "H100-SXM", "h100-sxm"),
        (cluster, "HGX-H100", "hgx-h100"),
    ],
    ids=["link", "gpu", "cluster"],
)
def test_names_ignore_case(lookup, name, found):
    assert lookup(name).name == found


@pytest.mark.parametrize(
    ("lookup", "name", "message"),
    [
        (
            link,
            "nvlink4",
            "link name must be one of .*pcie-5, got 'nvlink4'; did you mean .*nvlink-4",
        ),
        (gpu, "a100", "gpu name must be one of .*t4, got 'a100'; did you mean .*a100-[48]0"),
        (cluster, "dgx-h100", "cluster name must be one of .*, got 'dgx-h100'; did you mean .*hgx"),
        (gpu, "quantum", "got 'quantum'$"),
    ],
)
def test_unknown_name_offers_the_nearest(lookup, name, message):
    with pytest.raises(ValueError, match=message):
        lookup(name)


@pytest.mark.parametrize(
    ("latency", "bandwidth", "message"),
    [
        (-1e-6, 1e9, "latency_s must be a finite number of at least 0, got -1e-06"),
        (1e-6, 0, "bandwidth_bytes_per_s must be a finite number above 0, got 0"),
        (float("nan"), 1e9, "latency_s"),
        (1e-6, float("inf"), "bandwidth_bytes_per_s"),
    ],
)
def test_impossible_link_is_refused(latency, bandwidth, message):
    with pytest.raises(ValueError, match=message):
        Link(latency, bandwidth)


def test_link_is_frozen_and_holds_numbers_that_do_not_wrap():
    wire = Link(0, np.int32(2**30))
    assert type(wire.bandwidth_bytes_per_s) is int
    with pytest.raises(dataclasses.FrozenInstanceError):
        wire.latency_s = 1


def test_gpu_with_a_bf16_rate_but_no_bf16_units_is_refused():
    with pytest.raises(ValueError, match="bf16_flop_per_s must be given exactly when"):
        dataclasses.replace(gpu("t4"), bf16_flop_per_s=65e12)
    with pytest.raises(ValueError, match="usable_bytes must be a finite number above 0"):
        GPU("mine", 16e9, 0, 65e12, 8e12, 320e9, bf16_tensor_cores=False)


def test_cluster_counts_its_gpus_and_needs_a_network_for_a_second_node():
    assert cluster("hgx-b200", n_nodes=16).n_gpus == 128
    with pytest.raises(ValueError, match="n_nodes must be 1 without an inter_node link, got 2"):
        cluster("t4-host", n_nodes=2)
    with pytest.raises(ValueError, match="gpus_per_node must be an int of at least 1, got 0"):
        Cluster(gpu("t4"), 0, link("pcie-3"))
    with pytest.raises(TypeError, match="n_nodes must be an int of at least 1, got 2.0"):
        cluster("hgx-h100", n_nodes=2.0)
