"""Count the collectives that a piece of torch code really calls, with their bytes.

    with CollectiveCounter() as counter:
        loss = model(x).sum()
        loss.backward()
    counter.count("all_reduce", "backward"), counter.bytes("all_reduce")

What it sees: everything that this thread hands to torch.distributed while the block runs, be it
plain (`dist.all_reduce`), functional (DTensor) or with fake tensors, synchronous or not, in the
forward and in the backward pass; DDP's buckets too.

What it does not see: other ranks; what happens inside a call (gloo's or nccl's own messages, for
which `Call.ring_bytes` is a model); calls of other threads; compiled graphs; symmetric-memory
operations; the receiving end of a point-to-point message, of which only the send is recorded.
"""

from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from parlab.collectives import schedules
from parlab.collectives.cost import traffic
from parlab.distributed import compat

# An operator's name without underscores begins with one of these; the first that fits counts.
OPERATIONS = {
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "reducescatter": "reduce_scatter",
    "alltoall": "all_to_all",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "gather": "gather",
    "scatter": "scatter",
    "isend": "send",
    "send": "send",
    "barrier": "barrier",
    "monitoredbarrier": "barrier",
}
NO_COLLECTIVES = ("wait", "wraptensor", "recv", "irecv", "checkfornan")
RINGS = {
    "all_reduce": schedules.ring_all_reduce_schedule,
    "all_gather": schedules.ring_all_gather_schedule,
    "reduce_scatter": schedules.ring_reduce_scatter_schedule,
}


@dataclass(frozen=True)
class Call:
    """One collective as one rank called it.

    bytes: of the whole tensor S, the larger of what goes in and what comes out: an all-gather's
    result, a reduce-scatter's argument. With it 2(N-1)/N S is an all-reduce's volume on a ring
    and (N-1)/N S that of the other two.
    """

    op: str
    phase: str
    bytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    n_ranks: int

    @property
    def ring_bytes(self):
        """Bytes that each rank sends if the call runs on a ring over equal chunks.

        >>> Call("all_reduce", "forward", 512, torch.float64, (64,), 4).ring_bytes
        768

        Raises ValueError for an operation that has no ring here.
        """
        if self.op not in RINGS:
            raise ValueError(f"op must be one of {', '.join(RINGS)} for a ring, got {self.op!r}")
        whole, rest = divmod(self.bytes, self.n_ranks)
        chunk = self.bytes / self.n_ranks if rest else whole
        return traffic(RINGS[self.op](self.n_ranks), chunk).busiest


class CollectiveCounter(TorchDispatchMode):
    """Context manager that records every collective called inside it, in order, in `calls`.

    The phase of a call is "backward" while autograd's engine runs, else "forward", unless
    `named_phase` gives it another name. Under activation checkpointing, pass
    `context_fn=counter.recomputing` to tell "recompute" apart, which runs inside the backward pass.

    >>> from parlab.distributed.launch import run_ranks
    >>> def count_one():
    ...     with CollectiveCounter() as counter:
    ...         torch.distributed.all_reduce(torch.ones(64))
    ...     return counter.count("all_reduce"), counter.bytes(), counter.ring_bytes()
    >>> run_ranks(count_one, 4)[0]  # 2 (N - 1) / N of 256 bytes on a ring
    (1, 256, 384)
    """

    def __init__(self):
        super().__init__()
        self.calls = []
        self._named = None

    def count(self, op=None, phase=None):
        """Number of recorded calls, of one operation or phase where given."""
        return len(self._chosen(op, phase))

    def bytes(self, op=None, phase=None):
        """Sum of the tensors' bytes S over these calls."""
        return sum(call.bytes for call in self._chosen(op, phase))

    def ring_bytes(self, op=None, phase=None):
        """Bytes that each rank sends in these calls if all of them run on rings."""
        return sum(call.ring_bytes for call in self._chosen(op, phase))

    def summary(self):
        """Calls as {(phase, op): number}, in the order of their first appearance."""
        numbers = {}
        for call in self.calls:
            key = (call.phase, call.op)
            numbers[key] = numbers.get(key, 0) + 1
        return numbers

    def recomputing(self):
        """The pair of contexts that `torch.utils.checkpoint.checkpoint` takes as `context_fn`."""
        return nullcontext(), self.named_phase("recompute")

    @contextmanager
    def named_phase(self, name):
        """Calls inside this block get the phase `name`."""
        before, self._named = self._named, name
        try:
            yield
        finally:
            self._named = before

    @classmethod
    def _should_skip_dynamo(cls):
        return False  # or torch loads its compiler at the first operator: 1 s on every rank

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if any(map(compat.is_dtensor_type, types)):
            return NotImplemented  # it will call again with each rank's own tensors
        result = func(*args, **kwargs)
        operation = _operation(func)
        if operation:
            self._record(operation, func, args, result)
        return result

    def _record(self, operation, func, args, result):
        # In-place operators pass outputs and inputs as their first two arguments.
        sides = [_tensors(args[0]), _tensors(args[1]), _tensors(result)]
        whole = max(sides, key=_nbytes)
        first = whole[0] if whole else torch.empty(0)
        self.calls.append(
            Call(
                op=operation,
                phase=self._phase(),
                bytes=0 if operation == "barrier" else _nbytes(whole),
                dtype=first.dtype,
                shape=tuple(first.shape),
                n_ranks=compat.group_size_of_call(func, args),
            )
        )

    def _phase(self):
        return self._named or ("backward" if compat.in_backward() else "forward")

    def _chosen(self, op, phase):
        return [
            call
            for call in self.calls
            if (op is None or call.op == op) and (phase is None or call.phase == phase)
        ]


def _operation(func):
    """The collective behind a dispatched operator; None for anything else."""
    if func.namespace not in ("c10d", "_c10d_functional"):
        return None
    name = func._schema.name.split("::")[1].replace("_", "")
    if name.startswith(NO_COLLECTIVES):
        return None
    for prefix, operation in OPERATIONS.items():
        if name.startswith(prefix):
            return operation
    raise NotImplementedError(f"{func} may be a collective: OPERATIONS has to say which")


def _tensors(argument):
    return [leaf for leaf in tree_leaves(argument) if isinstance(leaf, torch.Tensor)]


def _nbytes(tensors):
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
