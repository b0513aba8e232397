"""Watch the memory of a training step on real ranks: plain, sharded by hand, by `fully_shard`."""

import time
import weakref
from dataclasses import replace
from typing import NamedTuple

import torch
from torch.utils._pytree import tree_leaves

from parlab.distributed import compat
from parlab.distributed.counting import CollectiveCounter
from parlab.distributed.fsdp_train import SHARDERS
from parlab.distributed.gpt import GPT, TINY, token_batch, token_loss
from parlab.units import require_choice

DEEP = replace(TINY, layers=4)
SETTLE_S = 0.005  # gloo's threads hold on to a finished message for a moment


class MemoryWatch(CollectiveCounter):
    """A `CollectiveCounter` that also knows every tensor made inside it, for as long as it lives.

    Tensors that share memory count once, with its size at the moment of asking: `fully_shard` takes
    the memory of a tensor away and leaves the tensor, which `live.LiveBytes` would not notice. Not
    seen: what was there before, and what an operator allocates and frees inside itself.

    >>> with MemoryWatch() as memory:
    ...     x = torch.ones(100)
    ...     y, half = x * 2, x[:50]
    ...     before = memory.live()
    ...     del x, y
    >>> before, memory.live()  # half of x keeps all of it
    (800, 400)
    """

    def __init__(self):
        super().__init__()
        self._storages, self._gathered = weakref.WeakSet(), weakref.WeakSet()

    def live(self):
        """Bytes of all tensors that were made inside and are still alive."""
        return sum(storage.nbytes() for storage in self._storages)

    def gathered(self, model=None):
        """Bytes that all-gathers filled and that are still there, the whole weights of `model` too.

        `fully_shard` copies what was gathered into such weights, and drops the buffer later.
        """
        whole = {p.untyped_storage() for p in _whole_parameters(model)}
        return sum(storage.nbytes() for storage in whole.union(self._gathered))

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        calls = len(self.calls)
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if result is not NotImplemented:
            self._storages.update(_storages(result))
            if len(self.calls) > calls and self.calls[-1].op == "all_gather":
                self._gathered.update(_storages(args[0]))
        return result


class Moment(NamedTuple):
    """What one rank holds at one moment of a step.

    gathered: bytes of weights that are whole, in use or in the buffer of a message. live: of all
    tensors, the shards, gradients, optimizer states and activations among them.
    """

    when: str
    gathered: int
    live: int


def memory_over_step(by="torch", *, config=DEEP, rows=1, **options):
    """Bytes on this rank over a step of AdamW in float32, as a list of `Moment`s.

    Of two steps after a first one, each moment's less: a message's thread may let go late.

    "before the step"; "forward 0" to "forward L-1", at the end of each block's forward pass;
    "loss"; "backward L-1" to "backward 0", in the middle of each block's backward pass, between MLP
    and attention; "gradients", after the last; "after the step", when gradients are gone.

    Parameters
    ----------
    by : "plain" keeps the model as it is, "hand" and "torch" shard it.
    config, rows : the model, and the sequences of each rank's batch.
    options : those of `shard_by_hand` or `shard_by_torch`.

    >>> from parlab.distributed.launch import run_ranks
    >>> moments = run_ranks(memory_over_step, 2, args=("hand",))[0]
    >>> [(moment.when, moment.gathered) for moment in moments[:3]]  # the root and one block
    [('before the step', 0), ('forward 0', 61312), ('forward 1', 61312)]
    """
    by = require_choice("by", by, ("plain", *SHARDERS))
    readings = {}
    with MemoryWatch() as memory:
        tokens, targets = token_batch(config, rows)
        model = GPT(config)
        blocks = list(model.blocks)
        if by != "plain":
            model = SHARDERS[by](model, **options)
        sharded = model if by == "torch" else None

        def note(when):
            time.sleep(SETTLE_S)
            reading = memory.gathered(sharded), memory.live()
            readings.setdefault(when, []).append(reading)

        for i, block in enumerate(blocks):
            _call_after(block.mlp.register_forward_hook, note, f"forward {i}")
            _call_after(block.attention.register_full_backward_pre_hook, note, f"backward {i}")
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        for _ in range(3):
            note("before the step")
            loss = token_loss(model(tokens), targets)
            note("loss")
            loss.backward()
            note("gradients")
            optimizer.step()
            optimizer.zero_grad()
            del loss
            note("after the step")
    return [Moment(when, *map(min, *seen[1:])) for when, seen in readings.items()]


def gradients_between(reduce="every", config=TINY):
    """Bytes of gradients on this rank between two micro-batches, in float32.

    reduce : "every" leaves this rank's share after each backward pass. "last" holds the messages
        back by `set_requires_gradient_sync(False)`, and whole gradients stay on every rank.
    """
    reduce = require_choice("reduce", reduce, ("every", "last"))
    with MemoryWatch() as memory:
        tokens, targets = token_batch(config, 1)
        model = SHARDERS["torch"](GPT(config))
        model.set_requires_gradient_sync(reduce == "every")
        before = memory.live()
        token_loss(model(tokens), targets).backward()
        time.sleep(10 * SETTLE_S)
        return memory.live() - before


def _call_after(register, function, argument):
    register(lambda *_: function(argument))


def _whole_parameters(model):
    """Of a model under `fully_shard`, the parameters that are not cut at the moment."""
    parameters = [] if model is None else model.parameters()
    return [p for p in parameters if not compat.is_dtensor_type(type(p))]


def _storages(tensors):
    return {
        t.untyped_storage()
        for t in tree_leaves(tensors)
        if isinstance(t, torch.Tensor) and not compat.is_dtensor_type(type(t))
    }
