"""What one layer of production size keeps for backward, measured beside the formula.

    measure_layer(pl.model("llama-3-8b"), 2, sequence=8192, dropout=False, flash=True).show()
    pl.print_table(Line._fields, beside_formula(pl.model("gpt2"), 2, sequence=1024))

With fake tensors, in this process alone: a layer of GPT-3 takes less than a second.
"""

from collections import Counter
from contextlib import ExitStack
from dataclasses import replace
from typing import NamedTuple

import torch
from torch.utils.checkpoint import set_checkpoint_early_stop
from torch.utils.flop_counter import FlopCounterMode

from parlab.distributed import compat
from parlab.distributed.layers import Layer, Recomputed, stay
from parlab.distributed.saved import measure
from parlab.distributed.saved_watch import CUSTOM, EITHER, Saver
from parlab.distributed.sharding import f, g, gather_sequence, scatter_sequence
from parlab.memory.activations import activation_memory
from parlab.models import ModelConfig
from parlab.units import require_choice

DROPOUT = 0.1
RECOMPUTE = ("none", "selective", "full")


class Line(NamedTuple):
    """Bytes of one tensor of a layer: 0 by formula if that leaves it out."""

    block: str
    tensor: str
    formula: int
    measured: int


class Flops(NamedTuple):
    """FLOP of one layer and one micro-batch; `recompute` is the part of forward done twice."""

    forward: int
    recompute: int
    backward: int

    @property
    def total(self):
        """All three."""
        return sum(self)


def measure_layer(
    config,
    micro_batch,
    *,
    sequence,
    tp=1,
    sequence_parallel=False,
    recompute="none",
    dropout=True,
    flash=False,
    dtype=torch.bfloat16,
):
    """Run one layer forward on fake tensors and return what autograd keeps, as `saved.Saved`.

    Arguments are those of `activation_memory`. Tensor parallelism runs as one rank of a fake
    process group. Flash attention is the operator that a GPU runs, with the results that torch
    says it has; no GPU is asked. Statistics of a LayerNorm have 2 bytes here, on a GPU 4.

    Raises ValueError or TypeError as `activation_memory` does, and for experts or another kind of
    recomputation; RuntimeError for tp > 1 inside `run_ranks` or where a process group exists.

    >>> gpt3 = ModelConfig(layers=96, hidden=12288, heads=96, vocab=51200)
    >>> sbh = 2048 * 2 * 12288
    >>> for recompute in ("none", "selective", "full"):
    ...     print(round(measure_layer(gpt3, 2, sequence=2048, recompute=recompute).total / sbh, 4))
    114.0007
    34.0007
    2.0
    """
    recompute = require_choice("recompute", recompute, RECOMPUTE)
    options = {"tp": tp, "sequence_parallel": sequence_parallel, "recompute": recompute}
    activation_memory(
        config, micro_batch, sequence=sequence, dropout=dropout, flash=flash, **options
    )
    attention = "gpu-flash" if flash else "naive"
    with ExitStack() as contexts:
        if tp > 1:
            contexts.enter_context(compat.fake_process_group(tp))
        contexts.enter_context(compat.fake_tensors())
        layer = build_layer(config, attention, dropout=dropout, dtype=dtype, **options)
        positions = sequence // tp if sequence_parallel else sequence
        return measure(layer, torch.empty(micro_batch, positions, config.hidden, dtype=dtype))


def beside_formula(config, micro_batch, *, sequence, **options):
    """List what one layer keeps, by formula and measured, as `Line`s; both columns add up.

    Arguments are those of `measure_layer`. What the formula leaves out comes last: the norms'
    statistics, and a flash kernel's random seed.

    >>> from parlab.models import model
    >>> size = {"sequence": 8192, "dropout": False, "flash": True}
    >>> for line in beside_formula(model("llama-3-8b"), 2, **size):
    ...     if line.formula != line.measured:
    ...         print(line)
    Line(block='norms', tensor='statistics', formula=0, measured=131072)
    Line(block='attention', tensor='random seed', formula=0, measured=24)
    """
    memory = activation_memory(config, micro_batch, sequence=sequence, **options)
    formula = {(item.block, item.tensor): item.layer_bytes for item in memory.items}
    measured = Counter()
    for item in measure_layer(config, micro_batch, sequence=sequence, **options).items:
        measured[_tensor_name(item, config.gated)] += item.bytes
    names = dict.fromkeys([*formula, *measured])
    return [Line(*name, formula.get(name, 0), measured[name]) for name in names]


def count_flops(config, micro_batch, *, sequence, recompute="none", early_stop=True):
    """Count the FLOP of one layer's forward and backward pass, by torch's own counter, as `Flops`.

    A multiplication and an addition are 2, matrix products only; the scores of positions that the
    causal mask hides count, since attention that is written out computes them.

    early_stop: torch's default, which ends the second forward once backward has what it needs, so
        that the last product of the region does not run again. False is a whole second forward.

    >>> gpt3 = ModelConfig(layers=96, hidden=12288, heads=96, vocab=51200)
    >>> flops = count_flops(gpt3, 1, sequence=2048, recompute="full", early_stop=False)
    >>> flops.total / (flops.forward + flops.backward) == 4 / 3
    True
    """
    recompute = require_choice("recompute", recompute, RECOMPUTE)
    runs = {}
    for again in ("none", recompute):
        with compat.fake_tensors(), set_checkpoint_early_stop(early_stop):
            layer = build_layer(config, "naive", recompute=again, dropout=False)
            x = torch.empty(micro_batch, sequence, config.hidden, dtype=torch.bfloat16)
            with FlopCounterMode(display=False) as counter:
                y = layer(x.requires_grad_())
                forward = counter.get_total_flops()
                y.backward(torch.empty_like(y))
            runs[again] = forward, counter.get_total_flops() - forward
    (forward, backward), (_, both) = runs["none"], runs[recompute]
    return Flops(forward, both - backward, backward)


def build_layer(
    config,
    attention,
    *,
    tp=1,
    sequence_parallel=False,
    recompute="none",
    dropout=False,
    dtype=torch.bfloat16,
):
    """Build this rank's share of a layer, in a process group of tp ranks where tp > 1.

    attention: a kind of `layers.Core`. The other arguments are those of `measure_layer`.
    """
    if not isinstance(config, ModelConfig):
        raise TypeError(f"config must be a ModelConfig, got {config!r:.60}")
    if config.experts > 1:
        raise ValueError(f"config must have no experts, got {config.experts}: a layer has one MLP")
    share = replace(
        config,
        heads=config.heads // tp,
        kv_heads=config.kv_heads // tp,
        head_dim=config.head_size,
        ffn=config.ffn // tp,
    )
    enter, leave = (f, g) if tp > 1 else (stay, stay)
    if sequence_parallel:
        enter, leave = gather_sequence, scatter_sequence
    layer = Layer(
        share,
        attention,
        dropout=DROPOUT if dropout else 0.0,
        selective=recompute == "selective",
        enter=enter,
        leave=leave,
        dtype=dtype,
    )
    return Recomputed(layer) if recompute == "full" else layer


def _tensor_name(item, gated):
    """What `activation_memory` calls a tensor that a `Layer` keeps: (block, tensor)."""
    for saver in item.savers:
        if saver in _NAMES:
            block, tensor = _BLOCKS[saver.module.split(".")[0]], _NAMES[saver]
            return block, _GATED.get(tensor, tensor) if gated else tensor
    first = item.savers[0]
    return first.module, f"{first.operation}: {first.role}"


_BLOCKS = {
    "": "layer",
    "attention_norm": "norms",
    "attention": "attention",
    "mlp_norm": "norms",
    "mlp": "MLP",
}
_GATED = {
    "input of the first matrix": "input of gate and up",
    "input of the second matrix": "input of down",
}
_FLASH = "_scaled_dot_product_flash_attention"
_NAMES = {
    Saver(*saver): tensor
    for *saver, tensor in (
        ("", CUSTOM, 0, EITHER, "input"),
        ("attention_norm", "layer_norm", 0, "input 0", "input of the first"),
        ("attention_norm", "layer_norm", 0, "inside 0", "statistics"),
        ("attention_norm", "layer_norm", 0, "inside 1", "statistics"),
        ("attention_norm", CUSTOM, 0, EITHER, "input of the first"),
        ("attention_norm", CUSTOM, 1, EITHER, "statistics"),
        ("attention.project", "linear", 0, "input 0", "input of queries, keys, values"),
        ("attention.project", CUSTOM, 0, EITHER, "input of queries, keys, values"),
        ("attention.core", CUSTOM, 0, EITHER, "queries"),
        ("attention.core", CUSTOM, 1, EITHER, "keys"),
        ("attention.core", CUSTOM, 2, EITHER, "values"),
        ("attention.core", "matmul", 0, "input 0", "queries"),
        ("attention.core", "matmul", 0, "input 1", "keys"),
        ("attention.core", "softmax", 0, "output 0", "softmax output"),
        ("attention.core", "native_dropout", 0, "output 1", "softmax dropout mask"),
        ("attention.core", "matmul", 1, "input 0", "softmax after dropout"),
        ("attention.core", "matmul", 1, "input 1", "values"),
        ("attention.core", _FLASH, 0, "input 0", "queries"),
        ("attention.core", _FLASH, 0, "input 1", "keys"),
        ("attention.core", _FLASH, 0, "input 2", "values"),
        ("attention.core", _FLASH, 0, "output 1", "log-sum-exp of the scores"),
        ("attention.core", _FLASH, 0, "output 2", "random seed"),
        ("attention.core", _FLASH, 0, "output 3", "random seed"),
        ("attention.o", "linear", 0, "input 0", "input of the projection"),
        ("attention", "native_dropout", 0, "output 1", "dropout mask"),
        ("mlp_norm", "layer_norm", 0, "input 0", "input of the second"),
        ("mlp_norm", "layer_norm", 0, "inside 0", "statistics"),
        ("mlp_norm", "layer_norm", 0, "inside 1", "statistics"),
        ("mlp_norm", CUSTOM, 0, EITHER, "input of the second"),
        ("mlp_norm", CUSTOM, 1, EITHER, "statistics"),
        ("mlp.project", "linear", 0, "input 0", "input of the first matrix"),
        ("mlp.project", CUSTOM, 0, EITHER, "input of the first matrix"),
        ("mlp", "gelu", 0, "input 0", "input of GeLU"),
        ("mlp", "silu", 0, "input 0", "gate before SiLU"),
        ("mlp", "mul", 0, "input 0", "gate after SiLU"),
        ("mlp", "mul", 0, "input 1", "up"),
        ("mlp.down", "linear", 0, "input 0", "input of the second matrix"),
        ("mlp", "native_dropout", 0, "output 1", "dropout mask"),
    )
}
