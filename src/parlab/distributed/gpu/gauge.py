"""One memory gauge with two implementations: CUDA's own counters, and a tracker on the CPU.

    with open_gauge("cpu") as gauge:
        x = torch.ones(1000, device=gauge.device)
        gauge.now(), gauge.peak()

On the CPU the block runs with fake tensors, which have sizes but no data: a model of any size takes
seconds and no memory, and every byte of the same code is counted. Whoever
asks a tensor for its value gets 1.
"""

import weakref
from contextlib import contextmanager, nullcontext

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from parlab.distributed import compat
from parlab.units import require_choice

DEVICES = ("cuda", "cpu")


class CudaGauge:
    """The counters of torch's caching allocator for the current card.

    `now` and `peak` count from when the gauge was opened, so that the workspaces of cuBLAS, which
    a first product allocates for good, are left out; they are in `workspaces`.
    """

    def __init__(self):
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.workspaces = 0

    def open(self):
        """Let the libraries allocate what they keep, and count from there."""
        dtypes = [torch.float32, torch.float16]
        if torch.cuda.is_bf16_supported(including_emulation=False):
            dtypes.append(torch.bfloat16)
        for dtype in dtypes:
            # Backward too: its thread has workspaces of its own.
            weight = torch.ones(64, 64, dtype=dtype, device=self.device, requires_grad=True)
            (weight @ weight).sum().backward()
        torch.cuda.synchronize()
        del weight
        self.workspaces = torch.cuda.memory_allocated()

    def now(self):
        """Bytes of all tensors, as blocks of the allocator."""
        return torch.cuda.memory_allocated() - self.workspaces

    def peak(self):
        """The most bytes since `reset_peak`, as blocks of the allocator."""
        return torch.cuda.max_memory_allocated() - self.workspaces

    def requested_peak(self):
        """The same as asked for, before the allocator rounds every tensor up to its blocks."""
        return torch.cuda.memory_stats()["requested_bytes.all.peak"] - self.workspaces

    def reserved_peak(self):
        """The most bytes that the allocator held of the card."""
        return torch.cuda.max_memory_reserved()

    def context(self):
        """Bytes of the card that are used beside the allocator: CUDA's context, if nobody else."""
        free, total = torch.cuda.mem_get_info()
        return total - free - torch.cuda.memory_reserved()

    def reset_peak(self):
        """Let the peaks begin anew with what is there now."""
        torch.cuda.reset_peak_memory_stats()

    @contextmanager
    def limited_to(self, n_bytes):
        """Inside, this process may use so much of the card, as on a smaller one."""
        torch.cuda.empty_cache()
        total = torch.cuda.mem_get_info()[1]
        torch.cuda.set_per_process_memory_fraction(min(1.0, n_bytes / total))
        try:
            yield
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)

    def without_propagation(self):
        """A context; nothing differs inside."""
        return nullcontext()

    def synchronise(self):
        """Wait for queued kernels."""
        torch.cuda.synchronize()


class Tracker(TorchDispatchMode):
    """Counts the storages of all tensors with dimensions that operations return inside it.

    A number (a tensor without dimensions) is left out: on a card it takes one block of 512 bytes.
    Nothing inside an operation is seen. A storage that `fully_shard` empties or fills counts with
    its new size.
    """

    workspaces = 0

    def __init__(self):
        super().__init__()
        self.device = torch.device("cpu")
        self.limit = None
        self._counts = True
        self._now = self._peak = self._most = 0
        self._sizes = {}  # by id of the storage, which lives as long as its entry
        self._overflows = weakref.WeakSet()

    def now(self):
        """Bytes of all tensors."""
        return self._now

    def peak(self):
        """The most bytes since `reset_peak`."""
        return self._peak

    requested_peak = peak

    def reserved_peak(self):
        """The most bytes since the beginning."""
        return self._most

    def context(self):
        """There is none."""
        return 0

    def reset_peak(self):
        """Let the peak begin anew with what is there now."""
        self._peak = self._now

    @contextmanager
    def limited_to(self, n_bytes):
        """Inside, more than so many bytes raise what a card raises, torch.OutOfMemoryError."""
        before, self.limit = self.limit, n_bytes
        try:
            yield
        finally:
            self.limit = before

    def without_propagation(self):
        """Inside, what DTensor makes to work out the shapes of results does not count."""
        return compat.propagation_inside(self._paused)

    @contextmanager
    def _paused(self):
        before, self._counts = self._counts, False
        try:
            yield
        finally:
            self._counts = before

    def synchronise(self):
        """There is no queue."""

    @classmethod
    def _should_skip_dynamo(cls):
        return False  # or torch loads its compiler at the first operator: 1 s

    def __enter__(self):
        self._resize = resize = torch.UntypedStorage.resize_

        def resize_and_count(storage, size):
            result = resize(storage, size)
            self._resized(storage)
            return result

        torch.UntypedStorage.resize_ = resize_and_count
        return super().__enter__()

    def __exit__(self, *error):
        torch.UntypedStorage.resize_ = self._resize
        return super().__exit__(*error)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._local_scalar_dense.default:
            # A fake tensor has no value. An optimizer asks for its number of steps, and a scaler
            # whether a gradient has overflowed: none has.
            return 0.0 if args[0].untyped_storage() in self._overflows else 1.0
        if func is torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default:
            self._overflows.add(args[1].untyped_storage())
        if any(map(compat.is_dtensor_type, types)):
            return NotImplemented  # it will call again with this rank's own tensors
        result = func(*args, **kwargs or {})
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.dim() and self._counts:
                self._count(leaf.untyped_storage())
        return result

    def _count(self, storage):
        key = id(storage)
        if key in self._sizes:
            return
        size = storage.nbytes()
        if self.limit is not None and self._now + size > self.limit:
            raise torch.OutOfMemoryError(
                f"tried to allocate {size} bytes beside {self._now} of {self.limit}"
            )
        self._sizes[key] = size
        self._add(size)
        weakref.finalize(storage, self._free, key)

    def _resized(self, storage):
        if id(storage) in self._sizes:
            size = storage.nbytes()
            self._add(size - self._sizes[id(storage)])
            self._sizes[id(storage)] = size

    def _free(self, key):
        self._add(-self._sizes.pop(key))

    def _add(self, change):
        self._now += change
        self._peak = max(self._peak, self._now)
        self._most = max(self._most, self._now)


@contextmanager
def open_gauge(device):
    """Yield a gauge for "cuda" or "cpu"; its tensors go to `gauge.device`.

    >>> with open_gauge("cpu") as gauge:
    ...     x = torch.ones(1000, 1000, device=gauge.device)
    ...     y = (x + 1) * 2  # x + 1 is freed once y is there
    ...     gauge.now(), gauge.peak()
    (8000000, 12000000)
    """
    if require_choice("device", device, DEVICES) == "cpu":
        with compat.fake_tensors(beside_real_ones=True), Tracker() as tracker:
            yield tracker
        return
    gauge = CudaGauge()
    gauge.open()
    yield gauge
