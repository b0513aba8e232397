"""The watch behind `saved`: sees what autograd packs away, by which function, and its end."""

import weakref
from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import NamedTuple

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from parlab.distributed import compat


class Saver(NamedTuple):
    """Who keeps a tensor.

    module: its path inside the measured module, "" for that itself. operation: a torch function, or
    CUSTOM. call: number of this call among those in this module that keep something. role: what
    the tensor is to the function: "input 0", "output 1", "inside 0" (a copy, or a result that it
    does not return), or EITHER for CUSTOM, every tensor of which counts as a call of its own.
    """

    module: str
    operation: str
    call: int
    role: str


CUSTOM = "autograd.Function"  # `torch.utils.checkpoint` keeps its inputs with one, too
EITHER = "input or output"


@dataclass(frozen=True)
class SavedTensor:
    """One storage that autograd keeps: what the first saver sees of it, and all its bytes."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    bytes: int
    savers: tuple[Saver, ...]


class Moment(NamedTuple):
    """Bytes kept right after an event: "forward" or "recompute" kept more, "backward" freed."""

    event: str
    module: str
    bytes: int


class _Box:
    """What autograd gets to hold in place of a tensor; its end is the end of being kept."""

    def __init__(self, tensor):
        # Detached: an operation that keeps its own output would keep its graph alive, and itself.
        self.tensor = tensor.detach()


class _Entry:
    """A storage that is kept now."""

    def __init__(self, tensor):
        self.shape, self.dtype = tuple(tensor.shape), tensor.dtype
        self.bytes = tensor.untyped_storage().nbytes()
        self.savers = []
        self.holders = 0


class Watch(TorchFunctionMode):
    """Notes each storage that autograd keeps, by whom, and when it is let go."""

    def __init__(self, function, parameters):
        super().__init__()
        self.phase = "forward"
        self.moments = []
        self._modules = {}
        if isinstance(function, nn.Module):
            self._modules = dict(function.named_modules())
            if parameters is None:
                parameters = [*function.parameters(), *function.buffers()]
        storages = [tensor.untyped_storage() for tensor in parameters or ()]
        self._left_out = {id(storage): storage for storage in storages}
        self._entries = {}  # by id of the storage, which lives as long as its entry
        self._total = 0
        self._path = [""]  # of the modules that run
        self._second_forwards = []  # a context for each of them
        self._calls = Counter()
        self._packed = None  # by the torch function that runs

    def items(self):
        """The storages kept now."""
        return tuple(
            SavedTensor(entry.shape, entry.dtype, entry.bytes, tuple(entry.savers))
            for entry in self._entries.values()
        )

    def __enter__(self):
        self._hooks = saved_tensors_hooks(self._pack, lambda box: box.tensor)
        self._hooks.__enter__()
        self._handles = []
        for name, module in self._modules.items():
            before = module.register_forward_pre_hook(partial(self._enter_module, name))
            after = module.register_forward_hook(self._leave_module, always_call=True)
            self._handles += [before, after]
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        self._hooks.__exit__(*error)
        for handle in self._handles:
            handle.remove()

    def _enter_module(self, name, *_):
        self._path.append(name)
        self._second_forwards.append(self._watch_second_forward())
        self._second_forwards[-1].__enter__()

    def _leave_module(self, *_):
        self._second_forwards.pop().__exit__(None, None, None)
        self._path.pop()

    def _watch_second_forward(self):
        """Hooks above those by which torch keeps what it computes again, where these rule."""
        hooks = compat.second_forward_hooks()
        if hooks is None:
            return nullcontext()
        pack, unpack = hooks
        return saved_tensors_hooks(partial(self._pack_again, pack), unpack)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        self._packed = []
        try:
            with self._watch_second_forward():
                result = func(*args, **kwargs)
            if self._packed:
                operation = getattr(func, "__name__", str(func))
                self._add_savers(operation, tree_leaves((args, kwargs)), tree_leaves(result))
        finally:
            self._packed = None
        return result

    def _pack(self, tensor):
        box = _Box(tensor)
        self._hold(tensor, box, self.phase)
        return box

    def _pack_again(self, pack, tensor):
        """In a second forward torch's own `pack` keeps the tensor, until it is freed."""
        storage = tensor.untyped_storage()
        if id(storage) not in self._entries:  # as the input of the region is, longer than that
            self._hold(tensor, storage, "recompute")
        return pack(tensor)

    def _hold(self, tensor, holder, event):
        storage = tensor.untyped_storage()
        if id(storage) in self._left_out or not storage.nbytes():
            return  # torch 2.11's checkpoint keeps an empty tensor beside its inputs
        entry = self._entries.get(id(storage))
        if entry is None:
            entry = self._entries[id(storage)] = _Entry(tensor)
            self._note(event, entry.bytes)
        entry.holders += 1
        weakref.finalize(holder, self._let_go, id(storage))
        if self._packed is None:  # a custom function keeps its tensors after it has returned
            entry.savers.append(self._saver(CUSTOM, EITHER))
        else:
            self._packed.append((entry, tensor))

    def _let_go(self, key):
        entry = self._entries[key]
        entry.holders -= 1
        if not entry.holders:
            del self._entries[key]
            self._note(self.phase, -entry.bytes)

    def _note(self, event, change):
        self._total += change
        self.moments.append(Moment(event, self._path[-1], self._total))

    def _add_savers(self, operation, inputs, outputs):
        saver = self._saver(operation, "")
        roles = _Roles(inputs, outputs)
        for entry, tensor in self._packed:
            entry.savers.append(saver._replace(role=roles.of(tensor)))

    def _saver(self, operation, role):
        module = self._path[-1]
        self._calls[module, operation] += 1
        return Saver(module, operation, self._calls[module, operation] - 1, role)


class _Roles:
    """What saved tensors are to one call of a function, by their storages."""

    def __init__(self, inputs, outputs):
        self._known = [
            (leaf.untyped_storage(), f"{side} {number}")
            for side, leaves in (("input", inputs), ("output", outputs))
            for number, leaf in enumerate(filter(torch.is_tensor, leaves))
        ]
        self._inside = count()

    def of(self, tensor):
        storage = tensor.untyped_storage()
        for other, role in self._known:
            if other is storage:
                return role
        self._known.append((storage, f"inside {next(self._inside)}"))
        return self._known[-1][1]
