"""Idle time and activations in flight of pipelines, by formula and simulated, for the ledger."""

from parlab.memory.activations import activation_memory
from parlab.models import ModelConfig
from parlab.pipeline import schedules, zero_bubble
from parlab.pipeline.bubble import pipeline_bubble, pipeline_bubble_seconds
from parlab.pipeline.layers import split_layers
from parlab.pipeline.timeline import simulate

_MAKERS = {
    "gpipe": schedules.gpipe,
    "1f1b": schedules.one_f_one_b,
    "zb-h1": zero_bubble.zero_bubble_h1,
    "zb1p": zero_bubble.zero_bubble_h1,  # DeepSeek's name for it
    "zb-h2": zero_bubble.zero_bubble_h2,
    "zbv": zero_bubble.zero_bubble_v,
}
_FORMULAS = {"1f1b": "1F1B", "zb1p": "ZB-H1"}


def idle(p, m, v=1, of="total"):
    return pipeline_bubble(p, m, v, of=of)


def idle_simulated(schedule, p, m, v=1, of="total"):
    """Of a schedule by name; a backward takes as long as two forwards."""
    return _timeline(schedule, p, m, v).bubble(of)


def idle_units(schedule, p, m):
    """Idle time of the rank that idles longest within its own span, with F = I = W = 1."""
    return max(_timeline(schedule, p, m).idle_in_span)


def idle_units_by_formula(schedule, p, m):
    halves = {"input_gradient": 1, "weight_gradient": 1}
    return pipeline_bubble_seconds(_FORMULAS[schedule], p, m, 1, of="span", **halves)


def idle_over_1f1b(schedule, p, m):
    return idle_units(schedule, p, m) / idle_units("1f1b", p, m)


def held(schedule, p, m, v=1):
    """Micro-batches' worth of activations on the rank that holds most."""
    timeline = _timeline(schedule, p, m, v)
    return max(timeline.peak_in_flight) / timeline.schedule.v


def held_over_1f1b(schedule, p, m):
    return held(schedule, p, m) / held("1f1b", p, m)


def held_by_ranks(schedule, p, m, v=1):
    return _timeline(schedule, p, m, v).peak_in_flight


def gpt_3_bytes_held(schedule, p, m):
    """Of GPT-3 175B on the first stage, with tensor and sequence parallelism over 8."""
    gpt_3 = ModelConfig(layers=96, hidden=12288, heads=96, vocab=51200)
    layer = activation_memory(gpt_3, 1, sequence=2048, tp=8, sequence_parallel=True).layer_bytes
    return _timeline(schedule, p, m).peak_bytes(layer * gpt_3.layers // p)[0]


def messages(schedule, p, m, v=1):
    """All messages between ranks in a step."""
    return sum(map(sum, _schedule(schedule, p, m, v).messages))


def layers_of_stages(layers, stages):
    return [len(stage) for stage in split_layers(layers, stages)]


def _schedule(name, p, m, v):
    if name == "interleaved":
        return schedules.interleaved_1f1b(p, m, v)
    return _MAKERS[name](p, m)


def _timeline(name, p, m, v=1):
    schedule = _schedule(name, p, m, v)
    v = schedule.v
    return simulate(schedule, 1 / v, input_gradient=1 / v, weight_gradient=1 / v)
