"""A GPT cut into pipeline stages, and what a schedule's actions do to a stage.

The model itself knows nothing of pipelines: a stage holds some of its modules, under their old
names. `forward` (F), then either `backward` (B), or `input_gradient` (I) and later
`weight_gradient` (W).

Backward finds two things from the gradient of a layer's output: the gradient of its input and that
of its weights. Only the first is needed to go on to the layer before. I follows it down the stage
and keeps the gradient of every layer's output on its way; from these, W finds the gradients of the
weights, layer by layer. Together they compute what B does and no more. The price is memory from I
to W: what F kept is still there, and the kept gradients come on top. (Two plain calls of
`torch.autograd.grad`, one for the input and one for the weights, keep no gradients, but the second
one goes down the stage once more: B and I instead of I and W.)
"""

from functools import partial
from typing import NamedTuple

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from parlab.distributed.gpt import drop
from parlab.pipeline.layers import split_layers


class Stage(nn.Module):
    """Consecutive layers of a `gpt.GPT`: tokens (b, s) or x (b, s, h) to x, or logits (b, s, v).

    The first stage has the embeddings too, the last one norm and head. Parameters keep their names,
    such as "blocks.3.mlp.up.weight", and are the model's own. Only a tied head is a copy, as both
    ends of the model may be on different ranks: their gradients have to be summed afterwards.
    """

    def __init__(self, model, layers):
        super().__init__()
        config = model.config
        self.dropout = config.dropout
        self.first, self.last = layers.start == 0, layers.stop == config.layers
        self.blocks = nn.ModuleDict({str(layer): model.blocks[layer] for layer in layers})
        if self.first:
            self.tokens, self.positions = model.tokens, model.positions
        if self.last:
            self.norm, self.head = model.norm, model.head
            if config.tied:
                self.head = nn.Linear(config.hidden, config.vocab, bias=False)
                self.head.weight = nn.Parameter(model.tokens.weight.detach().clone())

    def forward(self, x):
        if self.first:
            places = torch.arange(x.shape[1], device=x.device)
            x = drop(self.tokens(x) + self.positions(places), self.dropout, self.training)
        for block in self.blocks.values():
            x = block(x)  # (b, s, h)
        return self.head(self.norm(x)) if self.last else x


def cut(model, stages):
    """Cut a `gpt.GPT` into a list of stages that share out its layers as `split_layers` does.

    Raises ValueError if a stage would have no layer.

    >>> from parlab.distributed.gpt import GPT, GPTConfig
    >>> model = GPT(GPTConfig(vocab=64, layers=7, hidden=32, heads=4, sequence=16))
    >>> [list(stage.blocks) for stage in cut(model, 3)]
    [['0', '1', '2'], ['3', '4'], ['5', '6']]
    """
    layers = model.config.layers
    if stages > layers:
        raise ValueError(
            f"layers must be at least the number of stages, ranks x chunks = {stages}, got "
            f"{layers}: a stage without a layer has nothing to compute"
        )
    return [Stage(model, part) for part in split_layers(layers, stages)]


class Held(NamedTuple):
    """What F keeps for backward: its input and the graph behind its output.

    The graph is held by its end; the output's own data may go. calls: of each layer that has
    parameters, with the end of its graph.
    """

    x: torch.Tensor
    end: GradientEdge
    calls: list[tuple[nn.Module, GradientEdge]]


def forward(stage, x, loss=None):
    """F: return the output for x, or the loss of it, and what backward needs."""
    if x.is_floating_point():
        x.requires_grad_()
    calls = []
    notes = [
        layer.register_forward_hook(partial(_note, calls))
        for layer in stage.modules()
        if list(layer.parameters(recurse=False))
    ]
    output = stage(x) if loss is None else loss(stage(x))
    for note in notes:
        note.remove()
    return output.detach(), Held(x, get_gradient_edge(output), calls)


def _note(calls, layer, _, output):
    calls.append((layer, get_gradient_edge(output)))


def backward(held, gradient=None):
    """B: add to the gradients of the weights, and return that of the input.

    gradient: of the output; None for a loss, as 1. The result is None for tokens.
    """
    torch.autograd.backward([held.end], [gradient])
    return held.x.grad


def input_gradient(held, gradient=None):
    """I: return the gradient of the input, and a list with those of the layers' outputs for W."""
    ends = [end for _, end in held.calls]
    has_gradient = held.x.requires_grad
    if has_gradient:
        ends.append(get_gradient_edge(held.x))
    gradients = list(torch.autograd.grad([held.end], ends, [gradient], retain_graph=True))
    return (gradients.pop() if has_gradient else None), gradients


def weight_gradient(held, gradients):
    """W: add to the gradients of the weights, from those of the layers' outputs."""
    for (layer, end), gradient in zip(held.calls, gradients, strict=True):
        weights = list(layer.parameters(recurse=False))
        parts = torch.autograd.grad([end], weights, [gradient])
        for weight, part in zip(weights, parts, strict=True):
            weight.grad = part if weight.grad is None else weight.grad + part
