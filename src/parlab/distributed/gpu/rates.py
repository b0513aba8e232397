"""The parts of the measuring program that time: products and attention, and whole steps."""

from parlab.distributed.gpu.machine import LEAVE_FREE, Found
from parlab.distributed.gpu.products import attention_seconds, product_seconds
from parlab.distributed.gpu.training import time_step
from parlab.gpu_prediction.rows import (
    attention_flops,
    attention_name,
    config_of,
    product_flops,
    product_name,
)
from parlab.gpu_prediction.training import autocast_memory

_WORDS = 50304  # a multiple of 64, where GPT-2 has 50257
_TIMED = {
    "GPT-2": ("gpt2", 8),
    "GPT-2, 50304 words": (
        {"layers": 12, "hidden": 768, "heads": 12, "vocab": _WORDS, "positions": 1024},
        8,
    ),
    "GPT of 1.3B": (
        {"layers": 24, "hidden": 2048, "heads": 16, "vocab": _WORDS, "positions": 2048},
        4,
    ),
}


def products(machine):
    """Matrix products and attention by size, in FLOP/s."""
    squares = [256, 512, 1024, 2048, 4096, 8192] if machine.on_card else [64, 128, 256]
    # The output layer of GPT-2, and the same with words added so that 64 divides their number.
    words = [[8192, vocab, 768] for vocab in (50257, 50304)] if machine.on_card else []
    attention = [4, 16, 2048, 128] if machine.on_card else [1, 2, 32, 8]
    compute = machine.compute if machine.on_card else "fp32"
    c = {
        "products": [[n, n, n] for n in squares] + words,
        "attention": attention,
        "compute": compute,
        "data_sheet": machine.data_sheet,
    }
    rows = {
        product_name(*shape): product_flops(*shape)
        / product_seconds(machine.device, *shape, compute)
        for shape in c["products"]
    }
    rows[attention_name(*attention)] = attention_flops(*attention) / attention_seconds(
        machine.device, *attention, compute
    )
    return Found(c, rows, {})


def steps(machine):
    """Seconds of a step of several models, beside the planner's estimate, and of the host."""
    timed = _TIMED if machine.on_card else {"small": (machine.shape, 1)}
    c = {"steps": {}, "compute": machine.compute if machine.on_card else "fp32"}
    c |= {"data_sheet": machine.data_sheet, "kernels": machine.on_card}
    rows = {}
    for name, (shape, b) in timed.items():
        config = config_of(shape)
        size = {"sequence": config.positions, "compute": c["compute"]}
        if autocast_memory(config, b, **size).peak > LEAVE_FREE * machine.free_bytes:
            continue
        c["steps"][name] = {"model": shape, "micro_batch": b, "sequence": config.positions}
        took = time_step(machine.device, config, b, **size)
        rows |= {name: took.step, f"{name}: host": took.host}
        if machine.on_card:
            rows[f"{name}: kernels alone"] = took.kernels
    if not rows:
        machine.require(autocast_memory(config, b, **size).peak)
    return Found(c, rows, {})
