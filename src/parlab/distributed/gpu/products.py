"""How fast a card multiplies matrices, by their size."""

import statistics
import time

import torch

from parlab.distributed.gpu.gauge import DEVICES
from parlab.distributed.gpu.training import DTYPES
from parlab.units import require_choice, require_int


def product_seconds(device, size, compute="bf16", *, repeats=7):
    """Median seconds of a product of two square matrices of `size` rows.

    Each time is of enough products in a row that starting them does not count.

    >>> product_seconds("cpu", 64, "fp32") > 0
    True
    """
    require_choice("device", device, DEVICES)
    size = require_int("size", size, minimum=1)
    dtype = DTYPES[require_choice("compute", compute, DTYPES)]
    # Random numbers: a card multiplies zeros and ones faster, since fewer of its wires switch.
    a, b = torch.randn(2, size, size, dtype=dtype, device=device)
    out = torch.empty_like(a)
    in_a_row = max(1, min(200, int(2e11 / size**3))) if device == "cuda" else 1

    def run():
        start = time.perf_counter()
        for _ in range(in_a_row):
            torch.mm(a, b, out=out)
        if device == "cuda":
            torch.cuda.synchronize()
        return (time.perf_counter() - start) / in_a_row

    run()
    return statistics.median(run() for _ in range(repeats))
