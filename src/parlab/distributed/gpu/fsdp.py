"""`fully_shard` on one card, plain and offloaded to the host, measured."""

import os
import tempfile
import time
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

from parlab.distributed import compat
from parlab.distributed.gpu.gauge import DEVICES, open_gauge
from parlab.distributed.gpu.training import STEPS, Step, best_compute, token_batch
from parlab.distributed.zero import held_bytes
from parlab.gpu_prediction.fsdp import fsdp_memory
from parlab.memory.moments import MOMENTS
from parlab.units import require_bool, require_choice, require_int

SUMMARY_LINES = ("Allocated memory", "Active memory", "Requested memory", "GPU reserved memory")


class MeasuredFsdp(NamedTuple):
    """What the gauge read in the last step under `fully_shard` at N = 1.

    totals: bytes on the card at each of `MOMENTS`, as in `training.Measured`. peak: the most.
    host_bytes: of weights, gradients and moments on the host. seconds: of the last step; None
    without a card. summary: the first lines of torch.cuda.memory_summary(), "" without a card.
    """

    totals: tuple[int, ...]
    peak: int
    host_bytes: int
    seconds: float | None
    summary: str

    def at(self, moment):
        """Bytes at one of `MOMENTS`."""
        return self.totals[MOMENTS.index(require_choice("moment", moment, MOMENTS))]


def measure_fsdp(
    device, config, micro_batch, *, sequence, offload=False, compute=None, steps=STEPS
):
    """Train a few steps under `fully_shard` on each block and then the model, on one card.

    Parameters are those of `fsdp_memory`. On "cpu" the group is fake, tensors have no data, and
    what offloading would move to the host is taken off what was counted, by looking at it.

    Raises RuntimeError where a process group exists or nccl is missing, MemoryError where the host
    is too small for the offload, torch.OutOfMemoryError where the card is.

    >>> from parlab.models import ModelConfig
    >>> small = ModelConfig(layers=2, hidden=64, heads=4, vocab=500, positions=64)
    >>> measured = measure_fsdp("cpu", small, 4, sequence=64)
    >>> measured.totals == fsdp_memory(small, 4, sequence=64).totals
    True
    """
    compute = compute or best_compute(device)
    predicted = fsdp_memory(
        config, micro_batch, sequence=sequence, offload=offload, compute=compute
    )
    require_int("steps", steps, minimum=2, why="the first makes the optimizer's states")
    on_card = device == "cuda"
    if require_bool("offload", offload) and on_card:
        require_host_memory(predicted.host_bytes)
    with one_rank(device) as mesh, open_gauge(device) as gauge, gauge.without_propagation():
        options = {"offload_policy": CPUOffloadPolicy(pin_memory=on_card)} if offload else {}

        def shard(model):
            for unit in (*model.blocks, model):
                fully_shard(unit, mesh=mesh, **options)

        # Without a scaler, also for fp16: bytes and times do not depend on the gradients' values.
        step = Step(gauge.device, config, compute=compute, shard=shard, scaled=False)
        tokens, targets = token_batch(micro_batch, sequence, config.vocab, gauge.device)
        for _ in range(steps):
            gauge.synchronise()
            start = time.perf_counter()
            totals, peak, *_ = step.watched(gauge, tokens, targets)
            gauge.synchronise()
            seconds = time.perf_counter() - start
        held = held_bytes(list(step.model.parameters()), step.optimizer)
        summary = short_summary() if on_card else ""
    # Numbers of steps, 4 bytes a parameter tensor, are on the host in any case.
    numbers = 4 * sum(1 for _ in step.model.parameters())
    host = held.total - numbers if offload else 0
    if offload and not on_card:
        during = host - held.gradients
        host_at = (host, during, during, host + predicted_temporaries(held, numbers))
        totals = tuple(total - there for total, there in zip(totals, host_at, strict=True))
        peak = max(totals)
    return MeasuredFsdp(tuple(totals), peak, host, seconds if on_card else None, summary)


def predicted_temporaries(held, numbers):
    """Bytes of what foreach makes beside AdamW's two moments: half of them."""
    return (held.optimizer - numbers) // 2


@contextmanager
def one_rank(device):
    """Yield the mesh of a group that has this process alone: nccl on a card, else a fake one."""
    if require_choice("device", device, DEVICES) == "cpu":
        with compat.fake_process_group(1):
            yield init_device_mesh("cpu", (1,))
        return
    if dist.is_initialized():
        raise RuntimeError("a process group exists already: dist.destroy_process_group() first")
    if not dist.is_nccl_available():
        raise RuntimeError(
            "this build of torch has no nccl (native Windows has none): use Linux, WSL2 or Colab"
        )
    with tempfile.TemporaryDirectory() as folder:
        store = f"file://{os.path.join(folder, 'store')}"
        dist.init_process_group("nccl", init_method=store, rank=0, world_size=1)
        try:
            yield init_device_mesh("cuda", (1,))
        finally:
            dist.destroy_process_group()


def require_host_memory(n_bytes):
    """Raise MemoryError, with need and have, where the host's free memory is less; Linux only."""
    have = free_host_bytes()
    if have is not None and have < n_bytes:
        raise MemoryError(
            f"offloading needs {n_bytes / 1e9:.2f} GB of the host's memory, of which "
            f"{have / 1e9:.2f} GB are free: close other programs or take a smaller model"
        )


def free_host_bytes():
    """Bytes that Linux says are available; None where it does not say."""
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            sizes = dict(line.split(":") for line in lines)
        return int(sizes["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return None


def short_summary():
    """The lines of torch.cuda.memory_summary() that total up memory, without the pools."""
    lines = torch.cuda.memory_summary(abbreviated=True).splitlines()
    head = [line for line in lines if "Metric" in line]
    kept = [line for line in lines if any(name in line for name in SUMMARY_LINES)]
    return "\n".join(head + kept)
