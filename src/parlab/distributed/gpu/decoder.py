"""A model of any `ModelConfig`'s shape without experts, with random weights: Qwen2.5's, say.

Positions are left out where they are rotary, which have no parameters: the bytes of model states
are the shape's, the words are not.
"""

from contextlib import nullcontext
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from parlab.distributed.gpt import token_loss
from parlab.distributed.gpu.gauge import open_gauge
from parlab.distributed.gpu.training import DTYPES, best_compute, token_batch
from parlab.distributed.layers import Layer, RMSNorm


class ProjectionsWithBiases(nn.Module):
    """Linear layers of one input, as `layers.Projections`, with biases."""

    def __init__(self, hidden, widths):
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(hidden, width) for width in widths)

    def forward(self, x):
        return tuple(linear(x) for linear in self.linears)


class Decoder(nn.Module):
    """Tokens (b, s) to logits (b, s, V); its parameters are exactly those that a config counts.

    Raises ValueError for a config with experts, learned positions, or biases other than "qkv".

    >>> from parlab.models import model
    >>> with torch.device("meta"):
    ...     qwen = Decoder(model("qwen2.5-0.5b"))
    >>> sum(weight.numel() for weight in qwen.parameters())
    494032768
    """

    def __init__(self, config):
        super().__init__()
        if config.experts > 1 or config.positions or not set(config.biases) <= {"qkv"}:
            raise ValueError(
                f"config must be of Llama's or Qwen's kind (no experts, no learned positions, "
                f"biases of qkv at most), got {config}"
            )
        self.tokens = nn.Embedding(config.vocab, config.hidden)
        self.layers = nn.ModuleList(Layer(config, "flash") for _ in range(config.layers))
        if "qkv" in config.biases:
            d = config.head_size
            widths = (config.heads * d, config.kv_heads * d, config.kv_heads * d)
            for layer in self.layers:
                layer.attention.project = ProjectionsWithBiases(config.hidden, widths)
        rms = config.norm == "rms"
        make_norm = RMSNorm if rms else nn.LayerNorm
        self.norm = make_norm(config.hidden, dtype=torch.float32)
        self.head = nn.Linear(config.hidden, config.vocab, bias=False)
        if config.tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens):
        x = self.tokens(tokens)  # (b, s, h)
        for layer in self.layers:
            x = layer(x)
        return F.linear(self.norm(x), self.head.weight)


class FullFineTuning(NamedTuple):
    """Bytes after a step and at the step's peak; `failed` is where memory ran out, "" if nowhere.

    after_step and peak are None where memory ran out; `message` is what the error said.
    """

    after_step: int | None
    peak: int | None
    failed: str
    message: str


def measure_full_fine_tuning(device, config, sequence, *, card_bytes=None, steps=2):
    """Train a Decoder with AdamW under autocast on one sequence, and catch the end of memory.

    card_bytes: let this process use only so much, as on a smaller card; None is the whole card.

    >>> from parlab.models import ModelConfig
    >>> small = ModelConfig(layers=2, hidden=64, heads=4, kv_heads=2, vocab=500, gated=True,
    ...                     biases=("qkv",), norm="rms")
    >>> run = measure_full_fine_tuning("cpu", small, 8)
    >>> run.after_step - 16 * small.n_params, run.peak - 20 * small.n_params  # tokens, targets
    (128, 128)
    >>> measure_full_fine_tuning("cpu", small, 8, card_bytes=18 * small.n_params).failed
    'optimizer'
    """
    compute = best_compute(device)
    place = "building the model"
    with (
        open_gauge(device) as gauge,
        nullcontext() if card_bytes is None else gauge.limited_to(card_bytes),
    ):
        try:
            with torch.device(gauge.device):
                model = Decoder(config)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True)
            tokens, targets = token_batch(1, sequence, config.vocab, gauge.device)
            for _ in range(steps):
                gauge.reset_peak()
                optimizer.zero_grad()
                place = "forward"
                narrow = compute != "fp32"
                with torch.autocast(gauge.device.type, DTYPES[compute], enabled=narrow):
                    loss = token_loss(model(tokens), targets)
                place = "backward"
                loss.backward()
                del loss
                place = "optimizer"
                optimizer.step()
            return FullFineTuning(gauge.now(), gauge.peak(), "", "")
        except torch.OutOfMemoryError as error:
            return FullFineTuning(None, None, place, str(error).splitlines()[0])
