"""Train the package's GPT with AdamW under autocast, and read the memory gauge at each moment."""

import statistics
import time
from contextlib import nullcontext
from typing import NamedTuple

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from parlab.distributed.gpt import GPT, GPTConfig, token_loss
from parlab.distributed.gpu.gauge import DEVICES, open_gauge
from parlab.gpu_prediction.training import COMPUTE, autocast_memory
from parlab.memory.moments import MOMENTS
from parlab.units import require_choice, require_int

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
STEPS = 3  # the first makes the optimizer's states


class Measured(NamedTuple):
    """What the gauge read in the last step.

    totals: bytes at each of `MOMENTS`; "after the step" and "loss" are what is there then,
        "backward" and "optimizer" the most in that phase.
    peak: the most in the whole step. requested_peak: the same before an allocator rounds sizes up.
    reserved_peak: the most that the allocator held. workspaces: bytes of libraries, left out above.
    context: bytes of the card that are used beside the allocator.
    compute: the numbers of matrix products, a key of `COMPUTE`.
    items: bytes by name, as `training_items` predicts them: differences between two readings.
    """

    totals: tuple[int, ...]
    peak: int
    requested_peak: int
    reserved_peak: int
    workspaces: int
    context: int
    compute: str
    items: dict[str, int]

    def at(self, moment):
        """Bytes at one of `MOMENTS`."""
        return self.totals[MOMENTS.index(require_choice("moment", moment, MOMENTS))]


def best_compute(device):
    """Return what a card multiplies fast: "bf16", or "fp16" without bf16 tensor cores, or "fp32".

    A T4 emulates bf16, and torch counts that as support unless asked not to.
    """
    if require_choice("device", device, DEVICES) == "cpu":
        return "bf16"
    if torch.cuda.is_bf16_supported(including_emulation=False):
        return "bf16"
    # Tensor cores for fp16 came with compute capability 7.0.
    return "fp16" if torch.cuda.get_device_capability() >= (7, 0) else "fp32"


def measure_training(
    device, config, micro_batch, *, sequence, recompute="none", compute=None, steps=STEPS
):
    """Train a few steps on a card and return the bytes of the last one, as `Measured`.

    On "cpu" nothing is computed: tensors have sizes but no data, and their bytes are counted.

    Parameters are those of `autocast_memory`; compute: None is `best_compute`.
    steps: at least 2, since the first one makes the optimizer's states.

    Raises torch.OutOfMemoryError where a card is too small, ValueError or TypeError as
    `autocast_memory` does.

    >>> from parlab.models import ModelConfig
    >>> small = ModelConfig(layers=2, hidden=64, heads=4, vocab=500, positions=64)
    >>> measured = measure_training("cpu", small, 4, sequence=64)
    >>> measured.totals == autocast_memory(small, 4, sequence=64).totals
    True
    """
    compute = compute or best_compute(device)
    autocast_memory(config, micro_batch, sequence=sequence, recompute=recompute, compute=compute)
    require_int("steps", steps, minimum=2, why="the first makes the optimizer's states")
    with open_gauge(device) as gauge:
        before = gauge.now()
        step = Step(gauge.device, config, recompute, compute)
        weights = gauge.now() - before
        tokens, targets = token_batch(micro_batch, sequence, config.vocab, gauge.device)
        start = gauge.now()
        first, *_, last = [step.watched(gauge, tokens, targets) for _ in range(steps)]
        after, loss, backward, optimizer = last.totals
        items = {
            "weights": weights,
            "gradients": first.after_backward - start,
            "optimizer": first.totals[0] - first.after_backward,
            "behind the layers": last.behind_layers,
            "kept for backward": loss - (after - (first.after_backward - start)),
            "gradients of the logits": backward - loss,
            "temporaries of foreach": optimizer - after,
        }
        return Measured(
            last.totals,
            last.peak,
            last.requested_peak,
            gauge.reserved_peak(),
            gauge.workspaces,
            gauge.context(),
            compute,
            items,
        )


def measure_peaks(device, config, points, *, compute=None):
    """Train one model with each of several sizes (micro_batch, sequence); return the peaks.

    >>> from parlab.models import ModelConfig
    >>> small = ModelConfig(layers=2, hidden=64, heads=4, vocab=500, positions=64)
    >>> peaks = measure_peaks("cpu", small, [(4, 64), (8, 64)])
    >>> peaks == [autocast_memory(small, b, sequence=64).peak for b in (4, 8)]
    True
    """
    compute = compute or best_compute(device)
    with open_gauge(device) as gauge:
        step = Step(gauge.device, config, compute=compute)
        step.run(*token_batch(1, 1, config.vocab, gauge.device))  # makes the optimizer's states
        peaks = []
        for micro_batch, sequence in points:
            tokens, targets = token_batch(micro_batch, sequence, config.vocab, gauge.device)
            peaks.append(step.watched(gauge, tokens, targets).peak)
            del tokens, targets
    return peaks


class StepSeconds(NamedTuple):
    """Seconds of a step, of the host until it has started every kernel, and of all kernels added.

    Where the host takes as long as the step, the card waits for it. kernels: None without a card.
    """

    step: float
    host: float
    kernels: float | None


def time_step(device, config, micro_batch, *, sequence, recompute="none", compute=None, steps=5):
    """Train a few steps, after a first one, and return the medians, as `StepSeconds`.

    On "cpu" this computes with data, in fp32: only for small models.
    """
    require_int("steps", steps, minimum=1)
    device = require_choice("device", device, DEVICES)
    compute = compute or (best_compute(device) if device == "cuda" else "fp32")
    step = Step(torch.device(device), config, recompute, compute)
    tokens, targets = token_batch(micro_batch, sequence, config.vocab, device)
    times, started = [], []
    for _ in range(steps + 1):
        start = time.perf_counter()
        step.run(tokens, targets)
        started.append(time.perf_counter() - start)
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    kernels = _kernel_seconds(lambda: step.run(tokens, targets)) if device == "cuda" else None
    return StepSeconds(statistics.median(times[1:]), statistics.median(started[1:]), kernels)


def step_seconds(device, config, micro_batch, *, sequence, **options):
    """The seconds of a step alone, with the arguments of `time_step`."""
    return time_step(device, config, micro_batch, sequence=sequence, **options).step


def _kernel_seconds(run):
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as seen:
        run()
        torch.cuda.synchronize()
    on_card = [event for event in seen.events() if event.device_type == DeviceType.CUDA]
    return sum(event.self_device_time_total for event in on_card) / 1e6  # from microseconds


class Step:
    """A GPT on a device, its optimizer, and one training step of both.

    shard: called with the model before an optimizer takes its parameters. scaled: False leaves out
    the scaler that fp16 needs to learn something.
    """

    def __init__(self, device, config, recompute="none", compute="bf16", shard=None, scaled=True):
        self.device, self.compute = device, compute
        with torch.device(device):
            self.model = GPT(gpt_config(config, recompute))
        if shard is not None:
            shard(self.model)
        # The default of a card, named so that a CPU does the same.
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, foreach=True)
        narrow = scaled and self.compute == "fp16"
        # Small from the start: in a step that it skips, no optimizer makes its states.
        self.scaler = torch.amp.GradScaler(self.device.type, init_scale=2.0**8, enabled=narrow)

    def forward(self, tokens, targets):
        """The mean loss, under autocast."""
        narrow = self.compute != "fp32"
        dtype = DTYPES[require_choice("compute", self.compute, COMPUTE)]
        cast = torch.autocast(self.device.type, dtype) if narrow else nullcontext()
        with cast:
            return token_loss(self.model(tokens), targets)

    def update(self):
        """The optimizer's step; a scaler skips it where gradients have overflowed."""
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def run(self, tokens, targets):
        """One whole step; the gradients stay."""
        self.optimizer.zero_grad()
        self.scaler.scale(self.forward(tokens, targets)).backward()
        self.update()

    def watched(self, gauge, tokens, targets):
        """The same with a look at the gauge, as a `Reading`."""
        gauge.reset_peak()
        self.optimizer.zero_grad()
        before, behind_layers = gauge.now(), []
        look = self.model.norm.register_forward_pre_hook(
            lambda *_: behind_layers.append(gauge.now() - before)
        )
        loss = self.forward(tokens, targets)
        look.remove()
        at_loss, peaks = gauge.now(), [gauge.peak()]
        requested = [gauge.requested_peak()]

        def phase(run):
            gauge.reset_peak()
            run()
            peaks.append(gauge.peak())
            requested.append(gauge.requested_peak())

        scaled = self.scaler.scale(loss)
        del loss
        phase(scaled.backward)
        del scaled
        after_backward = gauge.now()
        phase(self.update)
        totals = (gauge.now(), at_loss, *peaks[1:])
        return Reading(totals, max(peaks), max(requested), behind_layers[0], after_backward)


class Reading(NamedTuple):
    """Bytes of one step: at each of `MOMENTS`, and the most, and that before rounding.

    behind_layers: what the layers' forward has added. after_backward: what is there then.
    """

    totals: tuple[int, ...]
    peak: int
    requested_peak: int
    behind_layers: int
    after_backward: int


def token_batch(rows, sequence, vocab, device):
    """Tokens and targets, both (rows, sequence): words in the order of the vocabulary.

    Bytes do not depend on the words, but the time of an embedding's gradient does: all positions
    of one word add to the same row.
    """
    words = torch.arange(2 * rows * sequence, device=device) % vocab
    return words.view(2, rows, sequence)


def gpt_config(config, recompute="none"):
    """The `GPTConfig` of a ModelConfig of GPT-2's kind."""
    return GPTConfig(
        vocab=config.vocab,
        layers=config.layers,
        hidden=config.hidden,
        heads=config.heads,
        sequence=config.positions,
        ffn=config.ffn,
        tied=config.tied,
        recompute=recompute,
    )
