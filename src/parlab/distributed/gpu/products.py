"""How fast a card multiplies matrices and attends, by size."""

import statistics
import time

import torch
from torch.nn import functional as F

from parlab.distributed.gpu.gauge import DEVICES
from parlab.distributed.gpu.training import DTYPES
from parlab.units import require_choice, require_int

ENOUGH_FLOP = 4e11  # for one time: a millisecond at least
MOST_IN_A_ROW = 200


def product_seconds(device, m, n, k, compute="bf16", *, repeats=7):
    """Median seconds of a product of an m x k and a k x n matrix.

    On a card each time is of many products that one CUDA graph starts: Python would take longer to
    start a small product than the card to compute it.

    >>> product_seconds("cpu", 64, 64, 64, "fp32") > 0
    True
    """
    device = require_choice("device", device, DEVICES)
    for name, size in (("m", m), ("n", n), ("k", k)):
        require_int(name, size, minimum=1)
    # Random numbers: a card multiplies zeros and ones faster, since fewer of its wires switch.
    size = {"dtype": DTYPES[require_choice("compute", compute, DTYPES)], "device": device}
    a, b, out = torch.randn(m, k, **size), torch.randn(k, n, **size), torch.empty(m, n, **size)
    in_a_row = max(1, min(MOST_IN_A_ROW, int(ENOUGH_FLOP / (2 * m * n * k))))
    return _median_seconds(device, lambda: torch.mm(a, b, out=out), in_a_row, repeats, graph=True)


def attention_seconds(device, b, heads, sequence, head_size, compute="bf16", *, repeats=7):
    """Median seconds of causal attention, forward and backward, by torch's own choice of kernel.

    >>> attention_seconds("cpu", 1, 2, 16, 8, "fp32") > 0
    True
    """
    device = require_choice("device", device, DEVICES)
    sizes = (("b", b), ("heads", heads), ("sequence", sequence), ("head_size", head_size))
    shape = [require_int(name, size, minimum=1) for name, size in sizes]
    dtype = DTYPES[require_choice("compute", compute, DTYPES)]
    q, k, v, gradient = torch.randn(4, *shape, dtype=dtype, device=device)
    inputs = [x.requires_grad_() for x in (q, k, v)]

    def run():
        out = F.scaled_dot_product_attention(*inputs, is_causal=True)
        torch.autograd.grad(out, inputs, gradient)

    in_a_row = max(1, min(20, int(ENOUGH_FLOP / (7 * b * heads * sequence**2 * head_size))))
    return _median_seconds(device, run, in_a_row, repeats)


def _median_seconds(device, run, in_a_row, repeats, graph=False):
    """Seconds of one of `in_a_row` runs, the median of some repeats after a first one."""
    if device != "cuda":
        in_a_row = 1
    run_all = _as_a_graph(run, in_a_row) if graph and device == "cuda" else None

    def timed():
        start = time.perf_counter()
        if run_all is not None:
            run_all()
        else:
            for _ in range(in_a_row):
                run()
        if device == "cuda":
            torch.cuda.synchronize()
        return (time.perf_counter() - start) / in_a_row

    timed()
    return statistics.median(timed() for _ in range(repeats))


def _as_a_graph(run, n):
    """A call that starts `n` runs at once."""
    run()  # outside of the graph: libraries make handles and workspaces the first time
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(n):
            run()
    return graph.replay
