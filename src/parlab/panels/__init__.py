"""What-if panels: pure functions from slider values to a picture, and their sliders.

`PANELS` is what the notebooks (`parlab.whatif`) and the worker of the published page show.
"""

import json
from collections.abc import Mapping
from importlib import import_module

from parlab.panels.panel import Panel, Picture, Pointed, Slider

__all__ = ["PANELS", "Panel", "Picture", "Pointed", "Slider", "answer"]

NAMES = (  # of the panels and of their modules
    "ring_stepper",
    "all_reduce_time",
    "bytes_per_rank",
    "unequal_shards",
    "ddp_overlap",
    "tensor_parallel_cost",
    "zero_ladder",
    "recompute_bytes",
    "does_it_fit",
    "pipeline_schedule",
    "expert_cost",
    "mesh",
    "choose_layout",
)


class _Panels(Mapping):
    """{name: Panel}, each loaded when it is asked for: a page has few of them, and waits."""

    def __getitem__(self, name):
        if name not in NAMES:
            raise KeyError(name)
        return import_module(f"{__name__}.{name}").PANEL

    def __iter__(self):
        return iter(NAMES)

    def __len__(self):
        return len(NAMES)


PANELS = _Panels()


def answer(question: str) -> str:
    """Answer one move of a slider in the page, in JSON, which crosses to JavaScript as one string.

    question: {"panel": its name, "indices": {slider: position}, "constants": {name: value}}.
    Returns {"svg": ..., "sentence": ..., "counts": {slider: how many positions it now has}}.

    With "where" in the question, a point of the picture or a part of it and keys as `Panel.point`
    takes them, returns what is there: {"label": ..., "outline": ..., "trail": ..., "at": ...}.
    """
    asked = json.loads(question)
    panel = PANELS[asked["panel"]]
    values = panel.at(asked["indices"], asked["constants"])
    if asked.get("where"):
        return json.dumps(panel.point(asked["where"], **values)._asdict())
    picture = panel.function(**values)
    counts = {slider.name: slider.n_allowed(values) for slider in panel.sliders}
    return json.dumps({"svg": picture.svg, "sentence": picture.sentence, "counts": counts})
