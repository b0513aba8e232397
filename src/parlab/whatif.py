"""What-if panels in a notebook: sliders while a kernel runs, a readable still everywhere else.

A panel's output carries a picture and a sentence as HTML, which the published page finds and
brings to life, and in a live kernel with ipywidgets also a view with sliders. The committed outputs
keep the HTML only.
"""

import json
import sys

from parlab.panels import PANELS, Panel
from parlab.svg import escape

VIEW = "application/vnd.jupyter.widget-view+json"


def ring_stepper(**values):
    """Step through a ring all-reduce; keywords n_ranks, step and shift set where it starts.

    >>> ring_stepper(n_ranks=3, step=2)
    N = 3 ranks, after step 2 of 4: the reduce-scatter is done and every rank owns one complete sum. Each rank has sent 2/3 of S so far.
    """  # noqa: E501
    return WhatIf(PANELS["ring_stepper"], values)


def all_reduce_time(**values):
    """All-reduce time against message size; keywords n_ranks, latency_us, bandwidth_GB_s."""
    return WhatIf(PANELS["all_reduce_time"], values)


def bytes_per_rank(**values):
    """Bytes of the busiest rank against N, ring and naive; keywords n_ranks, tensor_mb."""
    return WhatIf(PANELS["bytes_per_rank"], values)


def unequal_shards(**values):
    """Error of the plain and the weighted mean over ranks; keywords rows, n_ranks."""
    return WhatIf(PANELS["unequal_shards"], values)


def ddp_overlap(**values):
    """DDP's backward beside its all-reduces; keywords model, bucket_mib, bandwidth_GB_s,
    backward_ms, n_ranks and latency_us."""
    return WhatIf(PANELS["ddp_overlap"], values)


def tensor_parallel_cost(**values):
    """Tensor parallel: communication beside compute; keywords tp, hidden, sequence, micro_batch
    and link_GB_s."""
    return WhatIf(PANELS["tensor_parallel_cost"], values)


def zero_ladder(**values):
    """Model states by stage of ZeRO against a card; keywords model, n_gpus, stage, recipe, card."""
    return WhatIf(PANELS["zero_ladder"], values)


def recompute_bytes(**values):
    """What a layer keeps for backward and what recomputation drops; keywords model, sequence,
    micro_batch, tp, flash, recompute, sequence_parallel."""
    return WhatIf(PANELS["recompute_bytes"], values)


def does_it_fit(**values):
    """A training step on one GPU against a card, and the cheapest change that makes it fit;
    keywords model, card, n_gpus, micro_batch, sequence, tp, recompute and stage."""
    return WhatIf(PANELS["does_it_fit"], values)


def pipeline_schedule(**values):
    """A pipeline schedule as a Gantt chart, beside the formula; keywords schedule, p, m, v,
    backward, transfer, slow_rank and slowness. The published page names the action that a reader
    points at; a notebook can't, because its widgets hear of no pointer."""
    return WhatIf(PANELS["pipeline_schedule"], values)


def expert_cost(**values):
    """A layer of experts: all-to-alls beside compute; keywords ep, experts, active, ffn, load."""
    return WhatIf(PANELS["expert_cost"], values)


def choose_layout(**values):
    """The best layouts of a model on a cluster, and a chosen one beside them; keywords model,
    cluster, n_gpus, global_batch, sequence, tp, pp, zero, micro_batch and recompute."""
    return WhatIf(PANELS["choose_layout"], values)


def mesh(**values):
    """Which rank talks to whom, node by node; keywords n_gpus, tp, cp, pp, ep, rank and
    gpus_per_node."""
    return WhatIf(PANELS["mesh"], values)


class WhatIf:
    """One panel at chosen values, as Jupyter displays it."""

    def __init__(self, panel: Panel, chosen: dict):
        self.panel = panel
        self.values = panel.values(**chosen)
        self.picture = panel.function(**self.values)

    def __repr__(self):
        return self.picture.sentence

    def _repr_mimebundle_(self, include=None, exclude=None):
        bundle = {"text/plain": repr(self), "text/html": self.html()}
        box = self.sliders()
        if box is not None:
            # Written out, because ipywidgets 7 (Colab) has no _repr_mimebundle_ to ask.
            bundle[VIEW] = {"version_major": 2, "version_minor": 0, "model_id": box.model_id}
            if "google.colab" in sys.modules:
                del bundle["text/html"]  # leaves Colab nothing to choose before the sliders
        return bundle

    def html(self) -> str:
        """Return the still: picture, sentence and, for the page's script, what drives them."""
        panel = self.panel
        sliders = [
            {
                "name": slider.name,
                "label": slider.label,
                "index": slider.index(self.values[slider.name]),
                "count": slider.n_allowed(self.values),
                "shown": [slider.shown(value) for value in slider.values],
                "spoken": [slider.spoken(value) for value in slider.values],
            }
            for slider in panel.sliders
        ]
        constants = {name: self.values[name] for name in panel.constants}
        hint = f'data-hint="{panel.hint}" ' if panel.point else ""
        return (
            f'<div class="parlab-panel" data-panel="{panel.name}" data-title="{panel.title}" {hint}'
            f'data-constants="{escape(json.dumps(constants))}" '
            f'data-sliders="{escape(json.dumps(sliders, ensure_ascii=False))}">'
            f'<div class="parlab-picture">{self.picture.svg}</div>'
            f'<p class="parlab-sentence">{escape(self.picture.sentence)}</p></div>'
        )

    def sliders(self):
        """Return ipywidgets that redraw the panel, or None without ipywidgets or a kernel."""
        try:
            import ipywidgets
            from IPython import get_ipython
        except ImportError:
            return None
        if getattr(get_ipython(), "kernel", None) is None:
            return None
        widgets = {
            slider.name: ipywidgets.SelectionSlider(
                description=slider.label,
                options=self._options(slider),
                value=self.values[slider.name],
                style={"description_width": "initial"},
                layout={"width": "28rem", "max_width": "100%"},
            )
            for slider in self.panel.sliders
        }
        view = ipywidgets.HTML(self._view())

        redrawing = False

        def move(_):
            nonlocal redrawing
            if redrawing:  # new options reset a slider, which is no move of the reader's
                return
            redrawing = True
            self.values |= {name: widget.value for name, widget in widgets.items()}
            for slider in self.panel.sliders:
                widget, options = widgets[slider.name], self._options(slider)
                if len(widget.options) != len(options):
                    self.values[slider.name] = min(self.values[slider.name], options[-1][1])
                    widget.options = options
                    widget.value = self.values[slider.name]
            self.picture = self.panel.function(**self.values)
            view.value = self._view()
            redrawing = False

        for widget in widgets.values():
            widget.observe(move, "value")
        return ipywidgets.VBox([*widgets.values(), view])

    def _options(self, slider):
        allowed = slider.values[: slider.n_allowed(self.values)]
        return [(slider.shown(value), value) for value in allowed]

    def _view(self):
        return f"{self.picture.svg}<p>{escape(self.picture.sentence)}</p>"
