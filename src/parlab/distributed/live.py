"""Bytes of all tensors that exist, after every operation: the high-water mark of a piece of code.

    with LiveBytes() as live:
        loss(model(x)).backward()
    live.peak, live.now

It counts the storages of tensors that operations return while the block runs, until they are freed:
activations, gradients and temporaries alike, real or fake. Not counted: tensors from before the
block, what a kernel needs while it runs, and what an allocator reserves beyond that.
"""

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Context manager; `now` is the bytes that exist, `peak` the most of them so far.

    >>> with LiveBytes() as live:
    ...     x = torch.ones(100)
    ...     y = (x + 1) * 2  # x + 1 is freed once y is there
    >>> live.peak, live.now
    (1200, 800)
    """

    def __init__(self):
        super().__init__()
        self.now = self.peak = 0
        self._sizes = {}  # by id of the storage, which lives as long as its entry

    @classmethod
    def _should_skip_dynamo(cls):
        return False  # or torch loads its compiler at the first operator: 1 s

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        old = _storages((args, kwargs))
        for key, storage in _storages(result).items():
            if key not in self._sizes and key not in old:
                self._sizes[key] = storage.nbytes()
                self.now += storage.nbytes()
                weakref.finalize(storage, self._free, key)
        self.peak = max(self.peak, self.now)
        return result

    def _free(self, key):
        self.now -= self._sizes.pop(key)


def _storages(tree):
    leaves = filter(torch.is_tensor, tree_leaves(tree))
    return {id(storage): storage for storage in (leaf.untyped_storage() for leaf in leaves)}
