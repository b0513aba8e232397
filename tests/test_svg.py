"""Scales, marks and documents of parlab.svg."""

import re
import xml.etree.ElementTree as ET

import pytest

from parlab.svg import (
    PAPER,
    Scale,
    arrows,
    axes,
    bars,
    boxes,
    decades,
    document,
    dots,
    escape,
    fill,
    line,
    stretched,
    text,
)

SVG = "{http://www.w3.org/2000/svg}"


def test_a_linear_scale_maps_its_ends_and_middle():
    scale = Scale(-10, 30, 200, 100)
    assert [scale(-10), scale(10), scale(30)] == [200, 150, 100]


def test_a_log_scale_gives_every_decade_the_same_length():
    scale = Scale(1e3, 1e6, 0, 300, log=True)
    assert [scale(1e3), scale(1e4), scale(1e5), scale(1e6)] == pytest.approx([0, 100, 200, 300])


@pytest.mark.parametrize(
    "low, high, log, said",
    [
        pytest.param(5, 5, False, "low must be below high", id="empty"),
        pytest.param(float("nan"), 1, False, "low must be below high", id="nan"),
        pytest.param(0, 5, True, "low must be positive", id="log of zero"),
    ],
)
def test_a_scale_refuses_a_range_that_it_cannot_map(low, high, log, said):
    with pytest.raises(ValueError, match=said):
        Scale(low, high, 0, 1, log)


@pytest.mark.parametrize(
    "low, high, at_most, expected",
    [
        pytest.param(1, 1000, 5, [1, 10, 100, 1000], id="ends belong to it"),
        pytest.param(2, 999, 5, [10, 100], id="only whole decades"),
        pytest.param(1e-6, 1e3, 5, [1e-6, 1e-4, 1e-2, 1, 100], id="thinned evenly"),
        pytest.param(1e-5, 1e-3, 5, [1e-5, 1e-4, 1e-3], id="exact powers despite log10"),
    ],
)
def test_decades_are_the_powers_of_ten_in_a_range(low, high, at_most, expected):
    assert decades(low, high, at_most) == expected


@pytest.mark.parametrize(
    "data, expected",
    [
        pytest.param(line([(0, 1), (2, 3.04)]), "M0.0 1.0L2.0 3.0", id="line"),
        pytest.param(boxes([(1, 2), (5, 6)], 3, 4).count("z"), 2, id="boxes are closed"),
        pytest.param(arrows([(0, 9, 5)]), "M0.0 5.0H9.0m-6.0 -6.0l6.0 6.0l-6.0 6.0", id="arrow"),
        pytest.param(dots([(0, 0)] * 3).count("M"), 3, id="dots"),
        pytest.param(
            bars([0, 2.5], 3, 1 / 3, 9),
            "M0 3.0h0.3333v9.0h-0.3333M2.5 3.0h0.3333v9.0h-0.3333",
            id="bars",
        ),
    ],
)
def test_many_marks_share_one_path(data, expected):
    assert data == expected


def test_no_marks_draw_no_path():
    assert fill(boxes([], 1, 1)) == fill(bars([], 1, 1, 1)) == ""


def test_stretched_marks_keep_their_heights():
    (mark,) = ET.fromstring(stretched([fill(boxes([(1, 2)], 3, 4))], 40, 1.5))
    assert "translate(40 0) scale(1.5 1)" in stretched([], 40, 1.5)
    assert mark.get("d") == "M1.0 2.0h3.0v4.0h-3.0z"


def test_words_are_in_ink_unless_they_stand_on_a_mark():
    assert "fill" not in text(0, 0, "word")
    assert f"fill:{PAPER}" in text(0, 0, "word", colour=PAPER)


def test_text_is_escaped():
    assert ">a &lt; b &amp; c<" in text(0, 0, "a < b & c")
    assert ET.fromstring(f'<a b="{escape(chr(34) + "<&")}"/>').get("b") == '"<&'


def test_a_document_is_named_and_described_for_a_screen_reader():
    root = ET.fromstring(document(100, [], "A <title>", "What it shows."))
    title, description = root.find(f"{SVG}title"), root.find(f"{SVG}desc")
    assert (title.text, description.text) == ("A <title>", "What it shows.")
    assert root.get("aria-labelledby").split() == [title.get("id"), description.get("id")]
    assert root.get("role") == "img"


def test_different_pictures_never_share_an_id_and_equal_ones_are_equal():
    documents = [document(100, [text(0, 0, word)], "t", "d") for word in ("one", "two", "one")]
    ids = [re.findall(r' id="([^"]+)"', one) for one in documents]
    assert not {*ids[0]} & {*ids[1]}
    assert documents[0] == documents[2]


def test_axes_put_a_label_at_every_tick():
    x, y = Scale(0, 10, 50, 450), Scale(1, 100, 300, 20, log=True)
    drawing = axes(x, y, [(0, "zero"), (10, "ten")], [(10, "mid")], "across", "up")
    root = ET.fromstring(f"<g>{drawing}</g>")
    places = {t.text: (float(t.get("x")), float(t.get("y"))) for t in root.iter("text")}
    assert places["zero"][0] == 50 and places["ten"][0] == 450
    assert places["mid"][1] == pytest.approx(160, abs=6)
    assert {"across", "up"} < {*places}
