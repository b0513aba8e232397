"""The prediction of every row that `parlab.distributed.gpu` measures, from a part's configuration.

A recorded file holds the configuration, so its predictions can be computed anew at any time.

>>> rows = predicted_rows("full fine-tuning", {"model": "qwen2.5-0.5b", "sequence": 512,
...                                            "card_bytes": 8_000_000_000})
>>> rows["after the step"]
Predicted(unit='bytes', value=7904532480)
"""

from typing import NamedTuple

from parlab.gpu_prediction.fsdp import fsdp_memory, offload_seconds
from parlab.gpu_prediction.training import autocast_memory, training_items
from parlab.hardware import Cluster, gpu, link
from parlab.memory.moments import MOMENTS
from parlab.memory.states import zero_memory
from parlab.memory.step import CUDA_CONTEXT_BYTES
from parlab.models import ModelConfig, model
from parlab.planner.efficiencies import FITTED
from parlab.planner.estimate import estimate
from parlab.planner.layer import card_of, matmul_seconds
from parlab.planner.layout import Layout
from parlab.units import format_bytes, require_choice


class Predicted(NamedTuple):
    """A unit, and a value in it; None where nothing is predicted and the row only measures."""

    unit: str
    value: float | None


def predicted_rows(part, configuration):
    """Return {item: Predicted} for one of `PARTS`.

    configuration: what the part was run with, as a dict of plain values.
    Raises ValueError for an unknown part or for a configuration that lacks something.
    """
    part = require_choice("part", part, PARTS)
    try:
        return PARTS[part](configuration)
    except KeyError as missing:
        raise ValueError(
            f"configuration of part {part!r} must have {missing}, got {sorted(configuration)}"
        ) from None


def config_of(shape):
    """Return the ModelConfig that a name of the data sheet or a dict of sizes stands for."""
    return ModelConfig(**shape) if isinstance(shape, dict) else model(shape)


def line(x, y):
    """Return intercept and slope of the least-squares line through points.

    >>> line([1, 2, 4], [5, 7, 11])
    (3.0, 2.0)
    """
    n = len(x)
    mean_x, mean_y = sum(x) / n, sum(y) / n
    spread = sum((a - mean_x) ** 2 for a in x)
    slope = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / spread
    return mean_y - slope * mean_x, slope


def _step(c, recompute="none"):
    size = {"sequence": c["sequence"], "compute": c["compute"], "recompute": recompute}
    config, b = config_of(c["model"]), c["micro_batch"]
    step = autocast_memory(config, b, **size)
    rows = training_items(config, b, **size)
    rows |= {f"all, {moment}": step.at(moment) for moment in MOMENTS}
    rows["peak"] = rows["peak before rounding"] = step.peak
    return _in("bytes", rows)


def _training(c):
    beside = {"peak reserved by the allocator": None, "workspaces of libraries": None}
    return _step(c) | _in("bytes", beside | {"CUDA context": CUDA_CONTEXT_BYTES})


def _recompute(c):
    rows = _step(c, "full")
    kept = [
        training_items(
            config_of(c["model"]),
            c["micro_batch"],
            sequence=c["sequence"],
            compute=c["compute"],
            recompute=recompute,
        )["kept for backward"]
        for recompute in ("none", "full")
    ]
    rows |= _in("bytes", {"kept less than without": kept[0] - kept[1]})
    if "timed" in c:
        timed = c["timed"]
        flops = config_of(timed["model"]).flops_per_token(timed["sequence"])
        # Forward of the layers runs once more; backward is two forwards.
        again = (flops.forward - flops.head) / flops.training
        rows |= {
            "step": Predicted("s", None),
            "step with recomputation": Predicted("s", None),
            "step, times as long": Predicted("ratio", 1 + again),
        }
    return rows


def _sweep(c):
    config, rows = config_of(c["model"]), {}
    for name, points in (("micro-batch", c["batches"]), ("sequence", c["sequences"])):
        peaks = []
        for b, s in points:
            peak = autocast_memory(config, b, sequence=s, compute=c["compute"]).peak
            peaks.append(peak)
            rows[f"peak, {b} x {s} tokens, over the {name}"] = peak
        fixed, slope = line([b * s for b, s in points], peaks)
        rows[f"fixed, over the {name}"] = fixed
        rows[f"a token, over the {name}"] = slope
    return _in("bytes", rows)


def _full_fine_tuning(c):
    config, tokens = config_of(c["model"]), c["sequence"]
    rows = {}
    if not c.get("limited_only"):
        rows["after the step"] = 16 * config.n_params + 16 * tokens
        # The optimizer's step: where more is kept for backward than that, it is not the fullest.
        rows["peak"] = 20 * config.n_params + 16 * tokens
    limit = f"runs out of {format_bytes(c['card_bytes'])}"
    fails = 20 * config.n_params + 16 * tokens > c["card_bytes"]
    return _in("bytes", rows) | {limit: Predicted("yes or no", int(fails))}


def _fsdp(c):
    config, b = config_of(c["model"]), c["micro_batch"]
    size = {"sequence": c["sequence"], "compute": c["compute"]}
    plain = autocast_memory(config, b, **size)
    sharded = fsdp_memory(config, b, **size)
    rows = {
        "plain, after the step": plain.after_step,
        "plain, peak": plain.peak,
        "fully_shard, after the step": sharded.after_step,
        "fully_shard, peak": sharded.peak,
        "fully_shard, peak above the plain one": sharded.peak - plain.peak,
    }
    if c["offload"]:
        offloaded = fsdp_memory(config, b, offload=True, **size)
        rows |= {
            "offloaded, after the step": offloaded.after_step,
            "offloaded, peak": offloaded.peak,
            "offloaded, on the host": offloaded.host_bytes,
            "saved by offloading, peak": sharded.peak - offloaded.peak,
        }
    rows = _in("bytes", rows)
    if "step_s" in c:
        rows["fully_shard, step"] = Predicted("s", None)
    if c["offload"] and "step_s" in c:
        slower = offload_seconds(
            config, c["to_card_bytes_per_s"], c["to_host_bytes_per_s"], c["adam_params_per_s"]
        )
        rows["offloaded, step"] = Predicted("s", c["step_s"] + slower.total)
    return rows


def product_name(m, n, k):
    """The item of a matrix product: "n = 64" of a square one, else all three sizes."""
    return f"n = {n}" if m == n == k else f"{m} x {n}, inner size {k}"


def product_flops(m, n, k):
    """A multiplication and an addition for each of m n k."""
    return 2 * m * n * k


def attention_name(b, heads, sequence, head_size):
    """The item of causal attention."""
    return f"attention, {b} x {heads} heads, {sequence} x {head_size}"


def attention_flops(b, heads, sequence, head_size):
    """Two products of half of the scores forward, and 2.5 times that backward."""
    return 7 * b * heads * sequence**2 * head_size


def _products(c):
    card = None if c["data_sheet"] is None else card_of(gpu(c["data_sheet"]), FITTED)
    rates = {product_name(*shape): None for shape in c["products"]}
    rates[attention_name(*c["attention"])] = None
    if card is not None:
        for shape in c["products"]:
            took = matmul_seconds(card, *shape) + card.launch
            rates[product_name(*shape)] = product_flops(*shape) / took
        rates[attention_name(*c["attention"])] = card.attention
    return {item: Predicted("FLOP/s", rate) for item, rate in rates.items()}


def _steps(c):
    rows = {}
    for name, step in c["steps"].items():
        seconds = None
        if c["data_sheet"] is not None and c["compute"] != "fp32":
            alone = Cluster(gpu(c["data_sheet"]), 1, link("nvlink-4"))  # over which nothing goes
            b = step["micro_batch"]
            layout = Layout(micro_batch=b)
            config = config_of(step["model"])
            seconds = estimate(config, alone, layout, step["sequence"], b, fused=False).seconds
        rows |= {name: Predicted("s", seconds), f"{name}: host": Predicted("s", None)}
        if c["kernels"]:
            rows[f"{name}: kernels alone"] = Predicted("s", None)
    return rows


def _host_link(c):
    return {
        "to the card": Predicted("bytes/s", None),
        "to the host": Predicted("bytes/s", None),
        "AdamW on the host": Predicted("parameters/s", None),
    }


def _ranks(c):
    config, n = config_of(c["model"]), c["n_ranks"]
    shapes = [tuple(shape) for shape in c["parameter_shapes"]]
    states = zero_memory(
        config.n_params, n, 3, 8, weight_bytes=4, grad_bytes=4, parameter_sizes=shapes
    ).fullest
    return {
        "all-reduce, latency": Predicted("s", None),
        "all-reduce, bus bandwidth": Predicted("bytes/s", None),
        "all-reduce, mean error of the fit": Predicted("ratio", None),
        "Megatron MLP, largest difference": Predicted("absolute", 0.0),
        "model states of the fullest rank": Predicted("bytes", states.total),
    }


def _in(unit, values):
    return {item: Predicted(unit, value) for item, value in values.items()}


PARTS = {
    "training": _training,
    "recomputation": _recompute,
    "sweep": _sweep,
    "full fine-tuning": _full_fine_tuning,
    "host link": _host_link,
    "fsdp": _fsdp,
    "products": _products,
    "steps": _steps,
    "ranks": _ranks,
}
