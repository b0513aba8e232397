"""Writes what CPython answers for every panel, for the comparison with Python in a browser.

    python tests/panel_cases.py FOLDER

puts parlab.zip, as the page loads it, and cases.json into FOLDER: each case is the question that a
page asks (panel, slider positions, constants) and the answer, both as text.
"""

import json
import sys
from itertools import product
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

from parlab.panels import PANELS, answer  # noqa: E402
from tools.site import zip_package  # noqa: E402


def positions(panel):
    """The default and the corners of a panel's sliders, as {slider: position}.

    Of very many corners an odd step takes some 200, among them both ends of each slider.
    """
    names = [slider.name for slider in panel.sliders]
    ends = [(0, len(slider.values) - 1) for slider in panel.sliders]
    default = [slider.index(slider.default) for slider in panel.sliders]
    corners = list(product(*ends))
    corners = corners[:: max(1, len(corners) // 256) | 1]
    return [dict(zip(names, at, strict=True)) for at in [default, *corners]]


def questions():
    """Everything a test asks of the panels, in the form of `answer`."""
    for name, panel in PANELS.items():
        for indices in positions(panel):
            yield {"panel": name, "indices": indices, "constants": {}}
    textbook = {"n_ranks": 1, "step": 2}
    yield {"panel": "ring_stepper", "indices": textbook, "constants": {"shift": 1}}
    for indices in positions(PANELS["pipeline_schedule"]):
        for where in ({"x": 201.3, "y": 151.7}, {"at": None, "keys": ["End", "ArrowDown", "Home"]}):
            asked = {"panel": "pipeline_schedule", "indices": indices, "constants": {}}
            yield asked | {"where": where}


def main(folder):
    """Write the package and the cases."""
    folder.mkdir(parents=True, exist_ok=True)
    zip_package(folder / "parlab.zip")
    cases = [{"question": json.dumps(q), "answer": answer(json.dumps(q))} for q in questions()]
    (folder / "cases.json").write_text(json.dumps(cases), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
