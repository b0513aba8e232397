"""Fully sharded data parallelism by hand: what PyTorch's `fully_shard` does, on one page.

A unit is a module whose weights are gathered together: a block of the model, or what is
left of the model around its blocks. The weights of a unit lie end to end in one vector,
which zeros fill up to a multiple of the N ranks and which is cut into N equal shards: the
FlatParameter of PyTorch's first FSDP (arXiv 2304.11277). `fully_shard` cuts every weight
by itself, along its first dimension: other padding, the same training.

Left out: gathering the next unit while this one computes; another dtype for what is sent;
activation checkpointing inside a unit; groups other than all ranks.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call

from parlab.distributed import compat


class FullySharded(nn.Module):
    """A unit of which this rank holds 1/N, and all of it only while the unit computes.

    An optimizer over its parameters sees shards, so it updates, and remembers, 1/N.

    reshard_after_forward : free the weights after forward and gather them again for
        backward. False keeps in between those that backward needs.
    """

    def __init__(self, module, reshard_after_forward=True):
        super().__init__()
        weights = weights_to_shard(module)
        self.module = module
        self.reshard_after_forward = reshard_after_forward
        self.shapes = {name: weight.shape for name, weight in weights.items()}
        self.shard = nn.Parameter(shard_of(weights.values()))
        self.gathered_again = None
        for weight in weights.values():
            weight.data = weight.new_empty(0)  # the name stays, the memory goes

    def forward(self, *inputs):
        whole = GatherWeights.apply(self.shard, self)
        address = whole.untyped_storage().data_ptr()

        def keep(tensor):
            """What autograd keeps for backward: of a weight, only its place."""
            is_weight = tensor.untyped_storage().data_ptr() == address
            if is_weight and self.reshard_after_forward:
                return tensor.shape, tensor.stride(), tensor.storage_offset()
            return tensor.detach()  # an operation may keep its own result

        def recall(kept):
            """What autograd kept, when backward needs it."""
            if isinstance(kept, torch.Tensor):
                return kept
            if self.gathered_again is None:
                self.gathered_again = gather(self.shard)
            return self.gathered_again.as_strided(*kept)

        with saved_tensors_hooks(keep, recall):
            return functional_call(self.module, self.weights_in(whole), inputs)
        # From here on nobody refers to the gathered weights, so their memory is free.

    def weights_in(self, whole):
        """The weights by name, as views of the gathered vector."""
        sizes = [shape.numel() for shape in self.shapes.values()]
        *pieces, padding = whole.split([*sizes, len(whole) - sum(sizes)])
        named = zip(self.shapes.items(), pieces, strict=True)
        return {name: piece.view(shape) for (name, shape), piece in named}


class GatherWeights(torch.autograd.Function):
    """All-gather of the weights forward, reduce-scatter of their gradient backward."""

    @staticmethod
    def forward(ctx, shard, unit):
        ctx.unit = unit
        return gather(shard)

    @staticmethod
    def backward(ctx, gradient):
        # Autograd comes here when every operation of the unit has had its backward.
        ctx.unit.gathered_again = None
        mine = torch.empty_like(ctx.unit.shard)
        compat.reduce_scatter_rows(mine, gradient)
        return mine / dist.get_world_size(), None  # the ranks' mean


def gather(shard):
    """The shards of all ranks, end to end."""
    whole = shard.new_empty(len(shard) * dist.get_world_size())
    compat.all_gather_rows(whole, shard.detach())
    return whole


def shard_of(weights):
    """This rank's share of these weights, laid end to end and padded with zeros."""
    n, flat = dist.get_world_size(), torch.cat([weight.flatten() for weight in weights])
    padded = nn.functional.pad(flat, (0, -len(flat) % n))
    return padded.chunk(n)[dist.get_rank()].detach().clone()


def weights_to_shard(module):
    """The parameters, by name, that no unit inside holds yet; a tied one once.

    Raises ValueError where there are none, or where they cannot share one vector: if their
    dtypes differ, or one is frozen.
    """
    units = [unit for unit in module.modules() if isinstance(unit, FullySharded)]
    taken = {weight for unit in units for weight in unit.parameters()}
    weights = {name: w for name, w in module.named_parameters() if w not in taken}
    dtypes = {weight.dtype for weight in weights.values()}
    if len(dtypes) != 1 or not all(weight.requires_grad for weight in weights.values()):
        raise ValueError(
            "module must have weights of its own, of one dtype and all trained, got "
            f"{len(weights)} of dtypes {sorted(map(str, dtypes))}: they share one flat vector"
        )
    return weights


def shard_by_hand(model, reshard_after_forward=None):
    """Shard the `blocks` of a model, each as one unit, then what is left; returns the new model.

    reshard_after_forward : True or False for all units; None frees the blocks only, as
        `fully_shard` does: backward begins with the weights that forward used last.

    >>> from parlab.distributed.launch import run_ranks
    >>> from parlab.distributed.gpt import GPT, TINY
    >>> def sizes():
    ...     return [len(shard) for shard in shard_by_hand(GPT(TINY)).parameters() if len(shard)]
    >>> run_ranks(sizes, 2)[0], TINY.n_params // 2
    ([1312, 6352, 6352], 14016)
    """
    for i, block in enumerate(model.blocks):
        model.blocks[i] = FullySharded(block, reshard_after_forward is not False)
    return FullySharded(model, reshard_after_forward is True)
