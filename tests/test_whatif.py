"""The panels in a notebook: a still for every reader, sliders where a kernel runs."""

import json
import sys
import xml.etree.ElementTree as ET
from types import SimpleNamespace

import pytest

from parlab import whatif
from parlab.panels import PANELS

PANEL_FUNCTIONS = [getattr(whatif, name) for name in PANELS]


@pytest.fixture
def kernel(monkeypatch):
    """What ipywidgets sliders need to know of a kernel: that there is one."""
    monkeypatch.setattr("IPython.get_ipython", lambda: SimpleNamespace(kernel=object()))


@pytest.mark.parametrize("function", PANEL_FUNCTIONS, ids=lambda f: f.__name__)
def test_the_html_holds_picture_sentence_and_what_drives_them(function):
    shown = function()
    root = ET.fromstring(shown.html())
    panel = PANELS[root.get("data-panel")]
    assert function.__name__ == panel.name
    assert root.find(".//{http://www.w3.org/2000/svg}svg") is not None
    assert root.find("p").text == repr(shown) == panel.function(**panel.values()).sentence
    sliders = json.loads(root.get("data-sliders"))
    assert [slider["name"] for slider in sliders] == [slider.name for slider in panel.sliders]
    for declared, slider in zip(panel.sliders, sliders, strict=True):
        assert declared.values[slider["index"]] == declared.default
        assert len(slider["shown"]) == len(slider["spoken"]) == len(declared.values)


def test_the_html_starts_where_the_keywords_say():
    root = ET.fromstring(whatif.ring_stepper(n_ranks=3, step=2, shift=1).html())
    assert json.loads(root.get("data-constants")) == {"shift": 1}
    ranks, step = json.loads(root.get("data-sliders"))
    assert (ranks["index"], step["index"], step["count"]) == (1, 2, 5)
    assert "after step 2 of 4" in root.find("p").text


@pytest.mark.parametrize("function", PANEL_FUNCTIONS, ids=lambda f: f.__name__)
def test_two_runs_store_the_same_output(function):
    assert function().html() == function().html()


def test_without_a_kernel_or_without_ipywidgets_only_the_still_is_shown(monkeypatch, kernel):
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    assert set(whatif.ring_stepper()._repr_mimebundle_()) == {"text/plain", "text/html"}
    monkeypatch.undo()
    assert set(whatif.ring_stepper()._repr_mimebundle_()) == {"text/plain", "text/html"}


def test_in_a_kernel_the_same_still_comes_with_a_view_of_sliders(kernel):
    bundle = whatif.ring_stepper()._repr_mimebundle_()
    assert bundle["text/html"] == whatif.ring_stepper().html()
    assert bundle[whatif.VIEW]["model_id"]


def test_colab_gets_the_sliders_alone(kernel, monkeypatch):
    monkeypatch.setitem(sys.modules, "google.colab", object())
    assert set(whatif.ring_stepper()._repr_mimebundle_()) == {"text/plain", whatif.VIEW}


def test_moving_a_slider_redraws_picture_and_sentence(kernel):
    ranks, latency, bandwidth, view = whatif.all_reduce_time().sliders().children
    ranks.value = 8
    latency.value = 5
    bandwidth.value = 50
    expected = PANELS["all_reduce_time"].function(n_ranks=8, latency_us=5, bandwidth_GB_s=50)
    assert view.value == f"{expected.svg}<p>{expected.sentence}</p>"


def test_fewer_ranks_leave_fewer_steps(kernel):
    ranks, step, view = whatif.ring_stepper(n_ranks=8, step=14).sliders().children
    ranks.value = 3
    assert step.value == 4 and len(step.options) == 5
    assert "after step 4 of 4" in view.value
    ranks.value = 4
    assert step.value == 4 and len(step.options) == 7
    assert "after step 4 of 6" in view.value


def test_a_start_that_no_slider_can_reach_is_refused():
    with pytest.raises(ValueError, match="n_ranks"):
        whatif.ring_stepper(n_ranks=1)
    with pytest.raises(ValueError, match="step"):
        whatif.ring_stepper(n_ranks=3, step=5)
