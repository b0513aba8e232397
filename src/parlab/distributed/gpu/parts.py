"""The parts of the measuring program: what each runs, with which sizes, and what it returns."""

import torch

from parlab.distributed.gpu.decoder import measure_full_fine_tuning
from parlab.distributed.gpu.fsdp import measure_fsdp, require_host_memory
from parlab.distributed.gpu.machine import LEAVE_FREE, Found, Skipped
from parlab.distributed.gpu.ranks import measure_ranks, parameter_shapes
from parlab.distributed.gpu.rates import products, steps
from parlab.distributed.gpu.training import (
    measure_peaks,
    measure_training,
    step_seconds,
)
from parlab.gpu_prediction.fits import explain_out_of_memory
from parlab.gpu_prediction.fsdp import fsdp_memory
from parlab.gpu_prediction.rows import (
    config_of,
    line,
)
from parlab.gpu_prediction.training import autocast_memory
from parlab.memory.moments import MOMENTS
from parlab.units import GB, KIB, MB, format_bytes

SMALL_QWEN = {
    "layers": 2,
    "hidden": 64,
    "heads": 4,
    "kv_heads": 2,
    "vocab": 512,
    "gated": True,
    "biases": ["qkv"],
    "norm": "rms",
}
SMALL_CARD = 8 * GB


def training(machine):
    """A few steps of GPT under autocast, item by item."""
    c = machine.batch()
    run = measure_training(
        machine.device,
        config_of(c["model"]),
        c["micro_batch"],
        sequence=c["sequence"],
        compute=c["compute"],
    )
    only = {
        "peak reserved by the allocator": run.reserved_peak,
        "workspaces of libraries": run.workspaces,
        "CUDA context": run.context,
    }
    return Found(c, _step_rows(run) | only, {})


def recomputation(machine):
    """The same with activation checkpointing around every layer, and the time of both."""
    c = machine.batch()
    config, b = config_of(c["model"]), c["micro_batch"]
    size = {"sequence": c["sequence"], "compute": c["compute"]}
    without, run = (
        measure_training(machine.device, config, b, recompute=recompute, **size)
        for recompute in ("none", "full")
    )
    kept = [each.items["kept for backward"] for each in (without, run)]
    rows = _step_rows(run) | {"kept less than without": kept[0] - kept[1]}
    # Without a card the time is that of a small model that computes with data.
    timed = {"compute": c["compute"]} if machine.on_card else {"compute": "fp32", "steps": 1}
    b = b if machine.on_card else 1
    c["timed"] = {"model": c["model"], "micro_batch": b, "sequence": c["sequence"]}
    plain, again = (
        step_seconds(
            machine.device,
            config,
            b,
            sequence=c["sequence"],
            recompute=recompute,
            **timed,
        )
        for recompute in ("none", "full")
    )
    rows |= {
        "step": plain,
        "step with recomputation": again,
        "step, times as long": again / plain,
    }
    return Found(c, rows, {})


def sweep(machine):
    """Peaks over micro-batch and sequence, and the line through each."""
    c = machine.batch()
    config, s = config_of(c["model"]), c["sequence"]
    largest = c.pop("micro_batch")
    del c["sequence"]
    batches = [[b, s] for b in (1, 2, 3, 4, 6, 8) if b <= largest]
    sequences = [[min(4, largest), s * part // 4] for part in (2, 3, 4)]
    c["batches"], c["sequences"] = (
        [point for point in points if _backward_is_fullest(config, *point, c["compute"])]
        for points in (batches, sequences)
    )
    if min(len(c["batches"]), len(c["sequences"])) < 2:
        machine.require(autocast_memory(config, 2, sequence=s, compute=c["compute"]).peak)
    rows = {}
    for name, points in (("micro-batch", c["batches"]), ("sequence", c["sequences"])):
        peaks = measure_peaks(machine.device, config, points, compute=c["compute"])
        for (b, s), peak in zip(points, peaks, strict=True):
            rows[f"peak, {b} x {s} tokens, over the {name}"] = peak
        fixed, slope = line([b * s for b, s in points], peaks)
        rows[f"fixed, over the {name}"], rows[f"a token, over the {name}"] = fixed, slope
    return Found(c, rows, {})


def _backward_is_fullest(config, b, s, compute):
    """Elsewhere, with few tokens, the optimizer is, and the peak does not grow with them."""
    return autocast_memory(config, b, sequence=s, compute=compute).peak_moment == "backward"


def full_fine_tuning(machine):
    """Qwen2.5-0.5B's shape: its states, and the same on a card of 8 GB, where it fails."""
    shape = "qwen2.5-0.5b" if machine.on_card else SMALL_QWEN
    config, sequence = config_of(shape), 512 if machine.on_card else 8
    small = SMALL_CARD if machine.on_card else 18 * config.n_params
    c = {"model": shape, "sequence": sequence, "card_bytes": small}
    rows = {}
    if 20 * config.n_params + 16 * sequence <= LEAVE_FREE * machine.free_bytes:
        run = measure_full_fine_tuning(machine.device, config, sequence)
        rows = {"after the step": run.after_step, "peak": run.peak}
    else:
        c["limited_only"] = True
    limited = measure_full_fine_tuning(machine.device, config, sequence, card_bytes=small)
    rows[f"runs out of {format_bytes(small)}"] = int(bool(limited.failed))
    texts = {
        "where memory ran out": limited.failed or "nowhere",
        "message": limited.message,
        "explanation": explain_out_of_memory(config, small, sequence),
    }
    return Found(c, rows, texts)


def link(machine):
    """The link to the host and the host's own AdamW: what offloading will cost."""
    found = machine.link
    rows = {
        "to the card": found.to_card_bytes_per_s,
        "to the host": found.to_host_bytes_per_s,
        "AdamW on the host": found.adam_params_per_s,
    }
    return Found({"pinned": found.pinned}, rows, {})


def fsdp(machine):
    """`fully_shard` at N = 1 against the plain model, and offloaded to the host."""
    c = machine.batch(most=4)
    config, b = config_of(c["model"]), c["micro_batch"]
    size = {"sequence": c["sequence"], "compute": c["compute"]}
    machine.require(fsdp_memory(config, b, **size).peak)
    plain = measure_training(machine.device, config, b, **size)
    sharded = measure_fsdp(machine.device, config, b, **size)
    rows = {
        "plain, after the step": plain.at(MOMENTS[0]),
        "plain, peak": plain.peak,
        "fully_shard, after the step": sharded.at(MOMENTS[0]),
        "fully_shard, peak": sharded.peak,
        "fully_shard, peak above the plain one": sharded.peak - plain.peak,
    }
    texts = {"memory_summary": sharded.summary} if sharded.summary else {}
    if machine.on_card:
        c["step_s"] = step_seconds(machine.device, config, b, **size)
        rows["fully_shard, step"] = sharded.seconds
    try:
        if machine.on_card:
            require_host_memory(16 * config.n_params)
        found = machine.link
    except MemoryError as error:
        c["offload"] = False
        return Found(c, rows, texts | {"not offloaded": str(error)})
    c["offload"] = True
    c["to_card_bytes_per_s"] = found.to_card_bytes_per_s
    c["to_host_bytes_per_s"] = found.to_host_bytes_per_s
    c["adam_params_per_s"] = found.adam_params_per_s
    offloaded = measure_fsdp(machine.device, config, b, offload=True, **size)
    rows |= {
        "offloaded, after the step": offloaded.at(MOMENTS[0]),
        "offloaded, peak": offloaded.peak,
        "offloaded, on the host": offloaded.host_bytes,
        "saved by offloading, peak": sharded.peak - offloaded.peak,
    }
    if machine.on_card:
        rows["offloaded, step"] = offloaded.seconds
    return Found(c, rows, texts)


def ranks(machine):
    """Several cards under torchrun, or two processes in the dry run."""
    sizes = [4 * KIB, 64 * KIB, MB, 4 * MB] if not machine.on_card else _CARD_SIZES
    shape, n = machine.shape, 2
    if machine.on_card:
        rows = _under_torchrun(shape, sizes)
        import torch.distributed as dist

        n = dist.get_world_size()
    else:
        from parlab.distributed.launch import run_ranks

        rows = run_ranks(measure_ranks, n, args=(shape, sizes, 16, 0.02))[0]
    c = {"model": shape, "n_ranks": n, "sizes_bytes": sizes}
    return Found(c | {"parameter_shapes": parameter_shapes(config_of(shape))}, rows, {})


def _under_torchrun(shape, sizes):
    import os

    import torch.distributed as dist

    if dist.is_initialized() and dist.get_backend() != "nccl":
        raise Skipped(
            "this build of torch has no nccl (native Windows has none): use Linux or WSL2"
        )
    if not dist.is_initialized():
        n = torch.cuda.device_count()
        why = f"this machine has {n} card" if n < 2 else "it needs a process for each card"
        raise Skipped(
            f"{why}: with several cards, torchrun --nproc_per_node={max(n, 2)} "
            "-m parlab.distributed.gpu --parts ranks"
        )
    return measure_ranks(
        shape, sizes, hidden=1024, device=f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
    )


def _step_rows(run):
    moments = {f"all, {moment}": run.at(moment) for moment in MOMENTS}
    return run.items | moments | {"peak": run.peak, "peak before rounding": run.requested_peak}


_CARD_SIZES = [4**k * KIB for k in range(1, 10)]  # to 256 MiB

PARTS = {
    "training": training,
    "recomputation": recomputation,
    "sweep": sweep,
    "full fine-tuning": full_fine_tuning,
    "host link": link,
    "fsdp": fsdp,
    "products": products,
    "steps": steps,
    "ranks": ranks,
}
