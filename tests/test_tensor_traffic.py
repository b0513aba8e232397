"""Bytes and seconds of tensor parallelism: the published example, laws, counts, and the panel."""

import re
import xml.etree.ElementTree as ET
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import parlab as pl
from parlab.panels import tensor_parallel_cost as panel
from parlab.tensor_traffic import SHARE_OF_ALL_REDUCE

NVLINK, INFINIBAND = pl.Link(0, 450e9), pl.Link(0, 50e9)  # 4 and 400 Gb/s, without latency
EXAMPLE = {"hidden": 4096, "sequence": 4096, "micro_batch": 1, "tp": 8, "n_layers": 32}


def traffic(link=NVLINK, **changed):
    return pl.tensor_parallel_traffic(**{**EXAMPLE, "link": link, **changed})


# The worked example: 33.5 MB, 58.7 MB, 7.5 GB, 17 ms and 150 ms.


def test_one_all_reduce_of_the_example():
    item = traffic(n_layers=1).items[0]
    assert item.tensor_bytes == 4096 * 4096 * 2 == 33_554_432
    assert item.bytes_per_rank == Fraction(2 * 7, 8) * 33_554_432 == 58_720_256


def test_a_layer_of_the_example_has_4_all_reduces_of_234_88_mb():
    layer = traffic(n_layers=1)
    assert [(i.phase, i.block, i.op, i.count) for i in layer.items] == [
        ("forward", "attention", "all_reduce", 1),
        ("forward", "MLP", "all_reduce", 1),
        ("backward", "attention", "all_reduce", 1),
        ("backward", "MLP", "all_reduce", 1),
    ]
    assert layer.bytes_per_rank == 234_881_024


@pytest.mark.parametrize("link, milliseconds", [(NVLINK, 16.7), (INFINIBAND, 150.3)])
def test_a_micro_batch_of_the_example_takes_17_or_150_ms(link, milliseconds):
    batch = traffic(link)
    assert batch.count == 128 and batch.bytes_per_rank == 7_516_192_768
    assert round(1e3 * batch.seconds, 1) == milliseconds
    assert batch.latency_s == 0


def test_full_recompute_makes_6_all_reduces_and_11_3_gb():
    batch = traffic(recompute=True)
    assert batch.count == 6 * 32 and round(batch.bytes_per_rank / 1e9, 1) == 11.3
    assert (
        batch.only(phase="recompute").bytes_per_rank
        == traffic().only(phase="forward").bytes_per_rank
    )


def test_latency_is_14_steps_an_all_reduce():
    batch = traffic(pl.Link(3e-6, 450e9))
    assert batch.latency_s == pytest.approx(128 * 14 * 3e-6, rel=1e-12)
    assert batch.seconds == pytest.approx(batch.latency_s + traffic().seconds, rel=1e-12)


def test_about_50_ms_of_compute_is_an_h100_at_40_percent_and_an_a100_takes_159():
    flops = pl.layer_flops(4096, 4096, 1, n_layers=32)
    n_params = 32 * 12 * 4096**2  # 4 h^2 in attention, 8 h^2 in the MLP
    assert flops.weights == 6 * n_params * 4096
    seconds = [
        pl.compute_seconds(flops.weights, 8, pl.gpu(card)) for card in ("h100-sxm", "a100-80")
    ]
    assert [round(1e3 * s) for s in seconds] == [50, 159]
    # A further sixth for the scores, s / 6h.
    assert flops.scores / flops.weights == pytest.approx(1 / 6)
    assert pl.layer_flops(4096, 4096, 1, recompute=True).total * 3 == flops.total / 32 * 4


def test_flops_are_those_of_the_matrix_products_of_a_layer():
    h, s, b = 64, 16, 3
    shapes = [(b * s, h, 3 * h), (b * s, h, h), (b * s, h, 4 * h), (b * s, 4 * h, h)]
    flops = pl.layer_flops(h, s, b)
    assert flops.weights == 3 * sum(2 * m * k * n for m, k, n in shapes)
    assert flops.scores == 3 * b * (2 * s * h * s + 2 * s * s * h)  # Q K^T and its product with V


# Laws

SIZES = st.fixed_dictionaries(
    {
        "hidden": st.integers(1, 64).map(lambda k: 48 * k),
        "sequence": st.integers(1, 64).map(lambda k: 48 * k),
        "micro_batch": st.integers(1, 8),
        "tp": st.sampled_from([1, 2, 3, 4, 6, 8, 16]),
        "n_layers": st.integers(1, 40),
    }
)
LINKS = st.builds(pl.Link, st.floats(0, 1e-4), st.floats(1e9, 1e12))


@given(sizes=SIZES, link=LINKS, recompute=st.booleans(), sequence_parallel=st.booleans())
def test_totals_are_the_sums_of_the_items(sizes, link, recompute, sequence_parallel):
    whole = traffic(link, **sizes, recompute=recompute, sequence_parallel=sequence_parallel)
    for field in ("count", "bytes_per_rank", "latency_s", "transfer_s", "seconds"):
        total = sum(getattr(item, field) for item in whole.items)
        assert getattr(whole, field) == pytest.approx(total, rel=1e-12)
    parts = [whole.only(phase=phase) for phase in ("forward", "recompute", "backward")]
    assert sum(part.bytes_per_rank for part in parts) == whole.bytes_per_rank


@given(sizes=SIZES, link=LINKS, recompute=st.booleans())
def test_sequence_parallelism_moves_the_same_bytes_in_the_same_time(sizes, link, recompute):
    plain = traffic(link, **sizes, recompute=recompute)
    cut = traffic(link, **sizes, recompute=recompute, sequence_parallel=True)
    assert cut.bytes_per_rank == plain.bytes_per_rank
    assert cut.seconds == pytest.approx(plain.seconds, rel=1e-12)
    scatters, gathers = (cut.only(op=op).count for op in ("reduce_scatter", "all_gather"))
    assert scatters == gathers == plain.count


@pytest.mark.parametrize("op, run", [("reduce_scatter", "scatter"), ("all_gather", "gather")])
@pytest.mark.parametrize("n", [1, 2, 8])
def test_half_an_all_reduce_is_what_the_simulated_ring_sends(op, run, n):
    if run == "scatter":
        _, sent = pl.ring_reduce_scatter([np.zeros(64)] * n)
    else:
        _, sent = pl.ring_all_gather([np.zeros(64 // n)] * n)
    whole = pl.all_reduce_cost(n, 512, NVLINK).bytes_per_rank
    assert sent == [SHARE_OF_ALL_REDUCE[op] * whole] * n


@given(sizes=SIZES, link=LINKS)
def test_an_mlp_of_columns_only_sends_5_halves_forward_and_3_times_backward(sizes, link):
    megatron = traffic(link, **sizes).only(block="MLP")
    columns = pl.columns_only_mlp_traffic(**sizes, link=link)
    for phase, factor in (("forward", 2.5), ("backward", 3)):
        ours = columns.only(phase=phase).bytes_per_rank
        assert ours == pytest.approx(factor * megatron.only(phase=phase).bytes_per_rank, rel=1e-12)


@pytest.mark.parametrize("n", [2, 4])
def test_the_formulas_are_the_bytes_that_the_simulated_mlp_sends(n):
    x, a, b = np.ones((2, 3, 8)), np.ones((8, 32)), np.ones((32, 8))
    sizes = {"hidden": 8, "sequence": 3, "micro_batch": 2, "tp": n, "element_bytes": 8}
    for step, formula in (
        (pl.megatron_mlp_step, pl.tensor_parallel_traffic(**sizes, link=NVLINK).only(block="MLP")),
        (pl.columns_only_mlp_step, pl.columns_only_mlp_traffic(**sizes, link=NVLINK)),
    ):
        ran = step(x, a, b, x, n)
        assert ran.sent_forward == [formula.only(phase="forward").bytes_per_rank] * n
        assert ran.sent_backward == [formula.only(phase="backward").bytes_per_rank] * n


def test_one_card_sends_nothing():
    alone = traffic(pl.Link(1e-5, 1e9), tp=1)
    assert alone.bytes_per_rank == alone.seconds == 0


@pytest.mark.parametrize(
    "call, error, said",
    [
        pytest.param(
            lambda: traffic(tp=3), ValueError, "tp must divide hidden = 4096, got 3", id="h"
        ),
        pytest.param(
            lambda: traffic(sequence=4, sequence_parallel=True),
            ValueError,
            "divide the sequence of 4 tokens, got 8",
            id="s",
        ),
        pytest.param(lambda: traffic(tp=0), ValueError, "tp must be", id="no cards"),
        pytest.param(lambda: traffic(hidden=0), ValueError, "hidden must be", id="no features"),
        pytest.param(lambda: traffic(sequence=4096.0), TypeError, "sequence must be", id="float"),
        pytest.param(lambda: traffic(n_layers=0), ValueError, "n_layers must be", id="no layers"),
        pytest.param(lambda: traffic("nvlink-4"), TypeError, "must be a Link", id="a name"),
        pytest.param(lambda: traffic().only(layer=1), TypeError, "block, phase and op", id="only"),
        pytest.param(
            lambda: pl.columns_only_mlp_traffic(**EXAMPLE, link=NVLINK, ffn_hidden=12),
            ValueError,
            "tp must divide ffn_hidden = 12, got 8",
            id="f",
        ),
        pytest.param(lambda: pl.layer_flops(0, 1, 1), ValueError, "hidden must be", id="flops"),
        pytest.param(
            lambda: pl.compute_seconds(1, 1, pl.gpu("t4")), ValueError, "bf16 tensor cores", id="T4"
        ),
        pytest.param(
            lambda: pl.compute_seconds(1, 1, pl.gpu("h200"), efficiency=40),
            ValueError,
            "at most 1, got 40",
            id="percent",
        ),
    ],
)
def test_bad_input_is_refused_with_the_cause(call, error, said):
    with pytest.raises(error, match=said):
        call()


# The panel


def test_the_panels_constants_are_those_of_the_data_sheet():
    assert pl.gpu("h100-sxm").bf16_flop_per_s == panel.FLOP_PER_S
    node = pl.cluster("hgx-h100")
    assert node.gpus_per_node == panel.NODE
    for rate, (name, latency_us) in panel.LINKS.items():
        sheet = pl.link(name.replace(" ", "-"))
        assert sheet.bandwidth_bytes_per_s == rate * 1e9
        assert sheet.latency_s == pytest.approx(latency_us * 1e-6)
    for field in ("latency_s", "bandwidth_bytes_per_s"):
        assert getattr(node.inter_node, field) == getattr(panel.NETWORK, field)


def test_the_panel_says_the_example():
    said = panel.tensor_parallel_cost(8, 4096, 4096, 1, 450).sentence
    # 234.88 MB / 450 GB/s = 522 µs, and 4 x 14 steps of 2.96 µs; (24 h^2 + 4 s h) x 3 s FLOP.
    assert "in 4 all-reduces of 33.6 MB each card sends 235 MB over NVLink 4 (450 GB/s)" in said
    assert "in 688 µs; it computes for 1.82 ms (H100 at 40% of its dense bf16 peak)" in said
    assert "Communication is 27% of the time." in said
    assert "node" not in said


def test_the_panel_says_when_tensor_parallelism_leaves_the_node():
    said = panel.tensor_parallel_cost(16, 4096, 4096, 1, 450).sentence
    # 2 x 15/16 x 33.55 MB x 4 / 50 GB/s = 5.03 ms, and 4 x 30 steps of 5 µs.
    assert said.startswith("N = 16 cards per layer, more than a node has")
    assert "over InfiniBand 400G (50 GB/s) in 5.63 ms" in said
    # Hierarchical: 4 x (2 x 7/8 x 33.55 MB / 450 GB/s + 14 x 2.96 µs + 33.55 MB / 8 / 50 GB/s
    # + 2 x 5 µs) = 1.063 ms beside 0.912 ms of compute.
    assert "86% of the time, or 54% with a hierarchical all-reduce on all 8 network ports" in said


def test_a_ring_over_nodes_waits_for_pcie_where_that_is_the_slower():
    assert "over PCIe 4 (31.5 GB/s)" in panel.tensor_parallel_cost(16, 4096, 4096, 1, 31.5).sentence


def test_one_card_sends_nothing_in_the_panel():
    assert (
        "nothing is cut and nothing sent"
        in panel.tensor_parallel_cost(1, 4096, 4096, 1, 450).sentence
    )


def test_the_panel_marks_the_nodes_edge_between_8_and_16():
    root = ET.fromstring(panel.tensor_parallel_cost(8, 4096, 4096, 1, 450).svg)
    place = {e.text: float(e.get("x")) for e in root.iter("{http://www.w3.org/2000/svg}text")}
    shaded = next(
        float(re.match(r"M([\d.]+)", path.get("d"))[1])
        for path in root.iter("{http://www.w3.org/2000/svg}path")
        if path.get("fill-opacity")
    )
    assert place["8"] < shaded < place["16"]


@pytest.mark.parametrize("tp", [0, 128])
def test_the_panel_refuses_degrees_that_it_cannot_draw(tp):
    with pytest.raises(ValueError, match="tp must be an int from 1 to 64"):
        panel.tensor_parallel_cost(tp, 4096, 4096, 1, 450)
