"""The panel on expert parallelism: its numbers by hand, its constants in the data sheet."""

import xml.etree.ElementTree as ET

import pytest

import parlab as pl
from parlab.panels import PANELS
from parlab.panels import expert_cost as panel

PANEL = PANELS["expert_cost"]


def said(**chosen):
    return PANEL.function(**PANEL.values(**chosen)).sentence


def test_its_constants_are_those_of_the_data_sheet():
    assert pl.gpu("h100-sxm").bf16_flop_per_s == panel.FLOP_PER_S
    node = pl.cluster("hgx-h100")
    assert node.gpus_per_node == panel.NODE
    for ours, sheet in ((panel.LINK, node.intra_node), (panel.NETWORK, node.inter_node)):
        for field in ("latency_s", "bandwidth_bytes_per_s"):
            assert getattr(ours, field) == getattr(sheet, field)


def test_a_group_inside_a_node_by_hand():
    sentence = said(ep=8, experts=64, active=2, ffn=14336, load=1)
    # 4 x 4096 x 2 x 4096 x 2 x 7/8 bytes over 450 GB/s and 28 messages of 2.96 us;
    # 18 x 4096 x 14336 x 2 x 4096 FLOP; 64 x 3 x 4096 x 14336 x (4 / 8 + 12 / 64) bytes.
    assert "In 4 all-to-alls a GPU sends 235 MB in 605 µs;" in sentence
    assert "its experts compute for 21.9 ms" in sentence
    assert "Sending is 3% of the time. A layer's experts take 7.75 GB" in sentence


def test_a_group_of_two_nodes_sends_half_of_its_copies_to_the_other_by_hand():
    sentence = said(ep=16, experts=16, active=1, ffn=1024, load=1)
    # 4 x 4096 x 4096 x 2 bytes, of which 15/16 leave the rank and 8/16 the node, at 50 GB/s; 4 x 8
    # messages of 5 us beside them: 1.342 + 0.16 ms. 18 x 4096 x 1024 x 4096 FLOP in 0.781 ms.
    assert "a GPU sends 126 MB, 67.1 MB of it to other nodes, in 1.5 ms" in sentence
    assert "compute for 781 µs" in sentence
    assert "Sending is 66% of the time." in sentence


def test_the_load_multiplies_compute_and_bytes():
    sentence = said(ep=8, experts=64, active=2, ffn=14336, load=2)
    assert "load 2. In 4 all-to-alls a GPU sends 470 MB" in sentence
    assert "compute for 43.8 ms" in sentence


def test_one_gpu_a_group_sends_nothing_and_has_no_load_to_share():
    sentence = said(ep=1, experts=64, active=2, ffn=14336, load=2)
    assert "Each GPU has all experts and sends no tokens; they compute for 21.9 ms" in sentence
    assert "load" not in sentence


def test_no_group_is_larger_than_the_number_of_experts():
    last = {slider.name: len(slider.values) - 1 for slider in PANEL.sliders}
    values = PANEL.at(last | {"experts": 0}, {})
    assert (values["ep"], values["experts"]) == (16, 16)


@pytest.mark.parametrize("experts", [16, 64])
def test_lines_end_with_the_largest_group(experts):
    svg = PANEL.function(ep=8, experts=experts, active=2, ffn=4096, load=1).svg
    lines = [
        path.get("d").count("L") + 1
        for path in ET.fromstring(svg).iter("{http://www.w3.org/2000/svg}path")
        if path.get("stroke-width") == "3" and path.get("d").count("L") > 1
    ]
    # Compute at 1, 2, 4, ...; all-to-alls at 2, 4, 8, and from 16 on if there are three of those.
    assert lines == ([5, 3] if experts == 16 else [7, 3, 3])


@pytest.mark.parametrize("ep", [0, 128])
def test_groups_that_it_cannot_draw_are_refused(ep):
    with pytest.raises(ValueError, match="ep must be an int from 1 to 64"):
        panel.expert_cost(ep, 64, 2, 4096, 1)
