"""The drawn mesh: every letter is in the group that it names, and what is left out is counted.

A picture is read back from its SVG; the groups come from NumPy's axes, not from parlab.mesh.
"""

import re
import time
import xml.etree.ElementTree as ET
from collections import Counter
from itertools import product

import numpy as np
import pytest

import parlab as pl
from parlab.mesh import Mesh
from parlab.panels import PANELS
from parlab.panels.mesh_picture import LINKS, mesh_picture

SVG = "{http://www.w3.org/2000/svg}"
PANEL = PANELS["mesh"]
SQUARE = 24
DRAWN_WHOLE = {  # tp, cp, dp, pp, ep
    "one GPU": (1, 1, 1, 1, 1),
    "half a node": (2, 1, 2, 1, 1),
    "all axes": (4, 2, 4, 2, 1),
    "experts": (2, 2, 8, 2, 8),
    "tensors over two nodes": (16, 1, 2, 2, 1),
    "replicas only": (1, 1, 64, 1, 4),
}
whole = pytest.mark.parametrize("degrees", DRAWN_WHOLE.values(), ids=DRAWN_WHOLE)


def layout(tp, cp, dp, pp, ep):
    return Mesh(tp=tp, cp=cp, dp=dp, pp=pp, ep=ep)


def groups(tp, cp, dp, pp, ep, rank):
    """The group of a rank by letter, from two arrays of ranks, outermost axis first."""
    ranks = np.arange(pp * dp * cp * tp)
    dense = ranks.reshape(pp, dp, cp, tp)
    (p,), (d,), (c,), (t,) = np.nonzero(dense == rank)
    found = {"T": dense[p, d, c, :], "C": dense[p, d, :, t], "D": dense[p, :, c, t]}
    found |= {"P": dense[:, d, c, t], "z": dense[p, :, :, t]}
    experts = ranks.reshape(pp, dp * cp // ep, ep, tp)
    (p,), (d,), (e,), (t,) = np.nonzero(experts == rank)
    found |= {"E": experts[p, d, :, t], "X": experts[p, :, e, t]}
    return {letter: set(each.ravel().tolist()) for letter, each in found.items()}


def letters(svg, per_node=8):
    """{rank: its letters} of all squares that are drawn, empty where a square has none."""
    root = ET.fromstring(svg)
    (frames,) = (p for p in root.iter(f"{SVG}path") if p.get("stroke-opacity") == "0.5")
    corners = re.findall(r"M([\d.]+) ([\d.]+)h", frames.get("d"))
    texts = [(float(t.get("x")), float(t.get("y")), t.text) for t in root.iter(f"{SVG}text")]
    nodes = [int(re.match(r"node (\d+)", word)[1]) for *_, word in texts if word[:5] == "node "]
    (plain,) = (p for p in root.iter(f"{SVG}path") if p.get("fill-opacity") == "0.08")
    squares = [tuple(map(float, at)) for at in re.findall(r"M([\d.]+) ([\d.]+)h", plain.get("d"))]
    found = {}
    for number, (x, y) in enumerate(squares):
        node = nodes[number // per_node]
        left, top = map(float, corners[number // per_node])
        assert left < x and top < y  # the square lies in the box of its node
        inside = [w for tx, ty, w in texts if x < tx < x + SQUARE and y < ty < y + SQUARE]
        found[node * per_node + number % per_node] = "".join(inside)
    return found


def expected(degrees, rank):
    """{rank: letters} of all ranks that are in some group of a rank."""
    mine = groups(*degrees, rank)
    known = {}
    for each in range(int(np.prod(degrees[:4]))):
        first = next((letter for letter in "PDCTz" if each in mine[letter]), "")
        second = ""
        if degrees[4] > 1:
            second = "X" if each in mine["X"] else "E" if each in mine["E"] else ""
        known[each] = first + second
    return known | {rank: "R"}


@whole
def test_every_square_has_the_letters_of_its_groups(degrees):
    world = int(np.prod(degrees[:4]))
    for rank in {0, world // 3, world - 1}:
        drawn = letters(mesh_picture(layout(*degrees), 8, rank).svg)
        assert drawn == expected(degrees, rank)


@whole
def test_the_table_counts_each_group_and_its_ranks_in_a_node(degrees):
    rank = int(np.prod(degrees[:4])) // 2
    written = [t.text for t in ET.fromstring(mesh_picture(layout(*degrees), 8, rank).svg)[2:]]
    mine = groups(*degrees, rank)
    for letter, name in zip("TCDPzEX", ("TP", "CP", "DP", "PP", "DP·CP", "EP", "EDP"), strict=True):
        texts = [word for word in written if word]
        at = texts.index(name)
        ranks, shared, link = texts[at + 1 : at + 4]
        nodes = Counter(each // 8 for each in mine[letter])
        assert ranks.startswith(f"{len(mine[letter])}: {min(mine[letter])}")
        assert ranks.endswith(f"{max(mine[letter])}")
        assert shared == f"{min(nodes.values())} of {len(mine[letter])}"
        wires = ("NVLink, 450 GB/s", "InfiniBand, 50 GB/s")
        assert link == ("none" if len(mine[letter]) == 1 else wires[len(nodes) > 1])


@pytest.mark.parametrize(
    "degrees, rank",
    [
        pytest.param((8, 2, 8, 4, 4), 137, id="512 GPUs, all axes"),
        pytest.param((1, 1, 512, 1, 1), 256, id="512 replicas"),
        pytest.param((4, 16, 2, 4, 4), 292, id="long context"),
        pytest.param((16, 1, 2, 4, 1), 21, id="128 GPUs"),
    ],
)
def test_of_a_larger_world_the_own_node_and_every_axis_are_drawn_and_the_rest_is_counted(
    degrees, rank
):
    picture = mesh_picture(layout(*degrees), 8, rank)
    drawn, known = letters(picture.svg), expected(degrees, rank)
    assert drawn == {each: known[each] for each in drawn}
    assert drawn[rank] == "R" and len(drawn) <= 64
    missing = Counter(word[0] for each, word in known.items() if word and each not in drawn)
    world = len(known)
    (line,) = re.findall(r"Not drawn: [^<]*", picture.svg)
    assert f"{(world - len(drawn)) // 8} of {world // 8} nodes" in line
    assert {b: int(a) for a, b in re.findall(r"(\d+) ([TCDPz])\b", line)} == missing
    for letter, group in groups(*degrees, rank).items():
        if len(group) > 1 and (degrees[4] > 1 or letter not in "EX"):
            assert len(group & set(drawn)) > 1, letter  # at least one partner of each kind


def partners(sentence):
    """{axis: (first partner, last partner, link)} of a sentence."""
    found = {}
    for link, said in re.findall(r"over (NVLink|InfiniBand) on ([^;]*?)(?=; over|\.$)", sentence):
        for axis, ranks in re.findall(r"([A-Z·]+) to ([\d, …]+)", said):
            numbers = [int(n) for n in re.findall(r"\d+", ranks)]
            found[axis] = (numbers[0], numbers[-1], link)
    return found


@pytest.mark.parametrize(
    "degrees, rank, said",
    [
        # Megatron Core's 16 GPUs: [g0, g1], [g0, g2], and the next stage g4 of [g0, g4, g8, g12].
        pytest.param(
            (2, 1, 2, 4, 1),
            0,
            {"TP": (1, 1, "NVLink"), "DP": (2, 2, "NVLink"), "PP": (4, 4, "NVLink")},
            id="first stage",
        ),
        pytest.param(
            (2, 1, 2, 4, 1),
            4,
            {"TP": (5, 5, "NVLink"), "DP": (6, 6, "NVLink"), "PP": (0, 8, "InfiniBand")},
            id="inner stage",
        ),
        pytest.param(
            (2, 1, 2, 4, 1),
            13,
            {"TP": (12, 12, "NVLink"), "DP": (15, 15, "NVLink"), "PP": (9, 9, "NVLink")},
            id="last stage",
        ),
        # 4 GPUs a layer, 2 a sequence fill the node; 8 experts' ranks reach over four nodes.
        pytest.param(
            (4, 2, 8, 1, 8),
            0,
            {
                "TP": (1, 3, "NVLink"),
                "CP": (4, 4, "NVLink"),
                "DP·CP": (4, 60, "InfiniBand"),
                "EP": (4, 28, "InfiniBand"),
                "EDP": (32, 32, "InfiniBand"),
            },
            id="experts",
        ),
    ],
)
def test_the_sentence_names_the_partners_and_the_link_of_each_axis(degrees, rank, said):
    assert partners(mesh_picture(layout(*degrees), 8, rank).sentence) == said


def test_a_rank_alone_talks_to_no_one():
    assert mesh_picture(Mesh()).sentence == "N = 1 GPU, 8 a node. Rank 0 talks to no other."


def test_links_are_those_of_an_h100_node_in_the_data_sheet():
    node = pl.cluster("hgx-h100", n_nodes=2)
    for ours, theirs in zip(LINKS, (node.intra_node, node.inter_node), strict=True):
        assert ours.bandwidth_bytes_per_s == theirs.bandwidth_bytes_per_s
        assert ours.latency_s == theirs.latency_s
        assert theirs.name.startswith(ours.name.lower())


def test_other_links_are_named_where_they_are_given():
    node = pl.cluster("hgx-a100", n_nodes=2)
    links = (node.intra_node, node.inter_node)
    drawn = mesh_picture(Mesh(tp=8, dp=2), links=links)
    assert "over nvlink-3 on TP to 1, 2, … 7; over infiniband-200g on DP to 8." in drawn.sentence
    assert "nvlink-3, 300 GB/s" in drawn.svg and "infiniband-200g, 25 GB/s" in drawn.svg


def test_no_setting_changes_the_height_or_needs_more_than_three_lines():
    heights = set()
    choices = []
    for slider in PANEL.sliders:
        last = len(slider.values) - 1
        choices.append(
            range(last + 1) if slider.name != "rank" else sorted({0, 9, 99, 292, 301, last})
        )
    names = [slider.name for slider in PANEL.sliders]
    for at in product(*(c[::2] for c in choices)):
        values = PANEL.at(dict(zip(names, at, strict=True)), PANEL.constants)
        drawn = PANEL.function(**values)
        heights.add(re.search(r'viewBox="(.*?)"', drawn.svg)[1])
        assert len(drawn.sentence) <= 240, drawn.sentence
    assert len(heights) == 1
    for slider in PANEL.sliders:
        assert len(slider.label) <= 13
        assert all(len(slider.shown(value)) <= 10 for value in slider.values)


def test_a_slider_offers_only_degrees_that_the_gpus_leave():
    def allowed(**chosen):
        return {s.name: s.n_allowed(PANEL.values(**chosen)) for s in PANEL.sliders}

    # 16 GPUs: tp up to 16; beside tp 4 cp up to 4; beside cp 2 pp up to 2, and then dp = 1, so that
    # ep divides dp x cp = 2 (1 and 2).
    assert allowed(n_gpus=16, tp=4, cp=2, pp=2) == {
        "n_gpus": 7, "tp": 5, "cp": 3, "pp": 2, "ep": 2, "rank": 16
    }  # fmt: skip
    for at in product(range(7), range(6), range(6), range(6), range(6)):
        names = ("n_gpus", "tp", "cp", "pp", "ep")
        values = PANEL.at(dict(zip(names, at, strict=True)) | {"rank": 0}, PANEL.constants)
        replicas = values["n_gpus"] // (values["tp"] * values["pp"])
        assert replicas >= values["cp"] and replicas % values["ep"] == 0


@pytest.mark.parametrize(
    "gpus_per_node", [1, 2, 3, 4, 6, 8, 12, 16, 24, 64, 72], ids="{} a node".format
)
def test_nodes_of_other_sizes_lie_inside_the_picture(gpus_per_node):
    for nodes in (1, 2, 40):
        mesh = Mesh(dp=nodes * gpus_per_node, gpus_per_node=gpus_per_node)
        drawn = mesh_picture(mesh, gpus_per_node, rank=mesh.world - 1)
        width, height = map(float, re.search(r"viewBox=\"0 0 (\S+) (\S+)\"", drawn.svg).groups())
        found = re.findall(r"M([\d.]+) ([\d.]+)h([\d.]+)v([\d.]+)", drawn.svg)
        boxes = [
            (x, y, x + right, y + down) for x, y, right, down in (map(float, f) for f in found)
        ]
        for left, top, right, bottom in boxes:
            assert min(left, top) >= 0 and right <= width and bottom <= height
        # The frames of nodes come first, and every square up to the first text below lies in one.
        shown = min(nodes, 16, max(1, 64 // gpus_per_node))
        frames, squares = boxes[:shown], boxes[shown : shown * (1 + gpus_per_node)]
        for left, top, right, bottom in squares:
            assert any(a < left and b < top and right < c and bottom < d for a, b, c, d in frames)


def test_a_picture_of_a_million_gpus_takes_no_longer_than_its_groups():
    start = time.perf_counter()
    drawn = mesh_picture(Mesh(tp=8, pp=8, dp=2**14, ep=8), rank=999_999)
    assert time.perf_counter() - start < 3  # 0.1 s on a quiet machine
    assert "EP to 999943, 999951, … 999991" in drawn.sentence


@pytest.mark.parametrize(
    "wrong, said",
    [
        pytest.param({"n_gpus": 24, "tp": 16}, "tp x cp x pp = 64 must divide n_gpus", id="tp"),
        pytest.param({"ep": 16}, "ep must divide dp x cp = 4 x 2 = 8, got 16", id="ep"),
        pytest.param({"rank": 64}, "rank must be an int from 0 to 63", id="rank"),
        pytest.param({"gpus_per_node": 73}, "gpus_per_node must be .* from 1 to 72", id="node"),
        pytest.param({"n_gpus": 0}, "n_gpus must be", id="none"),
    ],
)
def test_a_world_that_cannot_be_drawn_is_refused(wrong, said):
    with pytest.raises(ValueError, match=said):
        PANEL.function(**PANEL.values() | wrong)
