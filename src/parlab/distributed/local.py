"""Every rank in one process, so that a cell can print all shards side by side.

torch's LocalTensorMode holds one tensor per rank and applies every operation to each; collectives
among them give what they would between processes. For small examples: nothing is parallel.
"""

from contextlib import contextmanager

from parlab.distributed import compat
from parlab.units import require_int


@contextmanager
def ranks_here(n):
    """Inside, n ranks share this process; yields the function that deals out one tensor per rank.

    `dist.get_rank()` is 0 for all, so code that asks for it, as `sharding.shard_layers` does, does
    not belong here; the operators `f`, `g`, `gather_sequence` and `scatter_sequence` do. A tensor
    made inside without `deal` is the same on every rank.

    Raises RuntimeError inside `run_ranks` or wherever a process group exists.

    >>> import torch
    >>> from parlab.distributed.sharding import g
    >>> x, B = torch.tensor([[1, 2, 3, 4]]), torch.arange(12).view(4, 3)
    >>> with ranks_here(2) as deal:
    ...     part = deal(x.chunk(2, 1)) @ deal(B.chunk(2, 0))  # columns of x, rows of B
    ...     whole = g(part)
    >>> [value.tolist() for value in on_each_rank(part)]
    [[[6, 9, 12]], [[54, 61, 68]]]
    >>> [value.tolist() for value in on_each_rank(whole)]
    [[[60, 70, 80]], [[60, 70, 80]]]
    """
    require_int("n", n, minimum=1)

    def deal(shards):
        shards = list(shards)
        if len(shards) != n:
            raise ValueError(f"shards must hold one tensor per rank, {n}, got {len(shards)}")
        # One that was itself made inside has a copy for every rank.
        return mode.rank_map(lambda rank: on_each_rank(shards[rank], n)[rank])

    with compat.fake_process_group(n), compat.local_tensor_mode(n) as mode:
        yield deal


def on_each_rank(tensor, n=1):
    """The list of plain tensors behind a dealt one; n times the same for any other tensor."""
    return compat.local_tensors(tensor) or [tensor] * n
