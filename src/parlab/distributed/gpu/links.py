"""Measure what an offloaded optimizer depends on: the link to the host, and the host itself."""

import statistics
import time
from typing import NamedTuple

import torch

from parlab.distributed.gpu.gauge import DEVICES
from parlab.units import MB, require_choice, require_int


class HostLink(NamedTuple):
    """Bytes a second from the host to the card and back, and parameters a second of AdamW there.

    pinned: whether the host's memory was page-locked, as CPUOffloadPolicy has it by default.
    """

    to_card_bytes_per_s: float
    to_host_bytes_per_s: float
    adam_params_per_s: float
    pinned: bool


def host_link(device, *, size_bytes=256 * MB, adam_params=20_000_000, repeats=3):
    """Time copies of one tensor both ways, and AdamW on the CPU; the best of some repeats.

    On "cpu" the copies stay in the host's memory: the program runs, the numbers are no link's.

    Raises MemoryError where the host cannot page-lock that much.
    """
    device = require_choice("device", device, DEVICES)
    elements = require_int("size_bytes", size_bytes, minimum=4) // 4
    pinned = device == "cuda"
    try:
        host = torch.ones(elements, pin_memory=pinned)
    except RuntimeError as error:
        raise MemoryError(
            f"the host cannot page-lock {size_bytes} bytes: close other programs, or raise the "
            f"limit of locked memory (ulimit -l); torch says: {error}"
        ) from error
    card = torch.empty(elements, device=device)
    to_card = min(_seconds(device, lambda: card.copy_(host)) for _ in range(repeats))
    to_host = min(_seconds(device, lambda: host.copy_(card)) for _ in range(repeats))
    return HostLink(
        4 * elements / to_card,
        4 * elements / to_host,
        _adam_params_per_s(adam_params, repeats),
        pinned,
    )


def _adam_params_per_s(n_params, repeats):
    """As fully_shard leaves it to torch: on a CPU one parameter after the other."""
    weights = [torch.nn.Parameter(torch.ones(n_params // 10)) for _ in range(10)]
    optimizer = torch.optim.AdamW(weights, foreach=True)
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    times = [_seconds("cpu", optimizer.step) for _ in range(repeats + 1)]
    return 10 * (n_params // 10) / statistics.median(times[1:])


def _seconds(device, call):
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start
