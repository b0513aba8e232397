"""Bytes that autograd keeps for the backward pass, measured tensor by tensor.

    kept = measure(layer, x)
    kept.total, kept.items[0].bytes
    kept.show()

What it sees: every tensor that a torch function hands to autograd while the forward pass runs, by
`torch.autograd.graph.saved_tensors_hooks`. A storage counts once, whole, however many functions
keep it and however small a view they keep. Real and fake tensors give the same bytes.

What it does not see: parameters and buffers, which it leaves out; temporaries and gradients; what a
kernel or an allocator adds; the state of the random generator that every checkpointed region keeps
(5 kB on a CPU); a custom `autograd.Function` outside any module when a region runs again; what a
compiled function keeps.
"""

from dataclasses import dataclass

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.utils._pytree import tree_leaves

from parlab.distributed.saved_watch import Moment, SavedTensor, Watch
from parlab.table import print_table
from parlab.units import format_bytes


@dataclass(frozen=True)
class Saved:
    """What one forward pass leaves for backward, in the order in which it was kept."""

    items: tuple[SavedTensor, ...]

    @property
    def total(self):
        """Bytes of all items."""
        return sum(item.bytes for item in self.items)

    def show(self):
        """Print the items as a table, one line each, with their first saver."""
        rows = []
        for item in self.items:
            first = item.savers[0]
            dtype = str(item.dtype).removeprefix("torch.")
            size = format_bytes(item.bytes)
            words = (first.module or "(itself)", first.operation, first.role)
            rows.append((*words, " x ".join(map(str, item.shape)) or "one", dtype, size))
        print_table(("module", "operation", "keeps its", "shape", "dtype", "bytes"), rows)


@dataclass(frozen=True)
class History:
    """Bytes that autograd keeps, at each change during one forward and one backward pass."""

    moments: tuple[Moment, ...]

    @property
    def after_forward(self):
        """Bytes kept when the forward pass is over."""
        return [moment.bytes for moment in self.moments if moment.event == "forward"][-1]

    @property
    def peak(self):
        """The most bytes kept at any moment."""
        return max(moment.bytes for moment in self.moments)


def measure(function, *inputs, parameters=None):
    """Run a forward pass and return what autograd then keeps, without parameters, as `Saved`.

    function: a module, or any function of tensors. inputs: its arguments; floating-point tensors
        are taken as results of earlier layers, which need a gradient. parameters: tensors to leave
        out; None is the parameters and buffers of `function`.

    Raises ValueError if the result needs no gradient.

    >>> mlp = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)).bfloat16()
    >>> kept = measure(mlp, torch.ones(2, 5, 8, dtype=torch.bfloat16))  # 18 s b h, s b h = 80
    >>> kept.total, [item.bytes for item in kept.items]
    (1440, [160, 640, 640])
    """
    watch = Watch(function, parameters)
    with watch:
        result = function(*map(_as_activation, inputs))
    _require_gradient(result)  # and keeps the graph alive until here
    return Saved(watch.items())


def history(function, *inputs, parameters=None):
    """Run forward and backward and return the bytes kept at each change, as a `History`.

    Recomputed tensors count from when the second forward of `torch.utils.checkpoint` (not its
    reentrant kind) keeps them until backward has used them. Parameters keep the `grad` they had.
    Arguments are those of `measure`.

    >>> layer = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    >>> run = history(layer, torch.ones(4, 8))
    >>> [moment.bytes for moment in run.moments]
    [128, 256, 128, 0]
    """
    watch = Watch(function, parameters)
    parameters = list(function.parameters()) if isinstance(function, nn.Module) else []
    before = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    try:
        # In this thread, the one that is watched, on a GPU too.
        with watch, torch.autograd.set_multithreading_enabled(False):
            results = _require_gradient(function(*map(_as_activation, inputs)))
            gradients = [torch.ones_like(result) for result in results]
            # Called with tensors, backward would suspend the watch, which is a function mode.
            edges = [get_gradient_edge(result) for result in results]
            watch.phase = "backward"
            torch.autograd.backward(edges, gradients)
            del edges, results
    finally:
        for parameter, gradient in zip(parameters, before, strict=True):
            parameter.grad = gradient
    return History(tuple(watch.moments))


def _as_activation(value):
    """An alias that needs a gradient, so that the caller's own tensor stays as it is."""
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return value.detach().requires_grad_()
    return value


def _require_gradient(result):
    results = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
    results = [leaf for leaf in results if leaf.requires_grad]
    if not results:
        raise ValueError(
            f"function must return a tensor that needs a gradient, got {result!r:.60}: "
            "autograd keeps nothing for another one"
        )
    return results
