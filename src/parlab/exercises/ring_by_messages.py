"""The exercise of chapter 1 on real processes: ring all-reduce, message by message."""

import numpy as np

from parlab.exercises.records import Case, Exercise
from parlab.exercises.ring import EXERCISES as OF_ARRAYS

N_RANKS = 4
(RING,) = OF_ARRAYS  # the same exercise on arrays: the same answers, and the same mistakes


def ring_by_messages(tensors):
    """All-reduce on a ring of processes, by `dist.isend` and `dist.irecv`; every rank calls this.

    tensors: one per rank, flat, of one size and dtype; the ranks need not divide the size. This
    rank's own is tensors[rank]; what the others have must come in messages. A rank sends to its
    right neighbour and receives from its left one, one chunk in each step. A message is under way
    until `.wait()` of both its ends has returned.

    Returns (result, sent): the elementwise sum, and the bytes that this rank sent.

    >>> import torch
    >>> from parlab import run_ranks
    >>> tensors = [torch.ones(3), 2 * torch.ones(3), 4 * torch.ones(3)]
    >>> run_ranks(ring_by_messages, 3, args=(tensors,))[0]  # 2 x 2 chunks of 4 bytes
    (tensor([7., 7., 7.]), 16)
    """
    import torch  # given
    import torch.distributed as dist  # given

    rank, n = dist.get_rank(), dist.get_world_size()  # given
    chunks = list(tensors[rank].clone().tensor_split(n))  # given
    sent = 0  # given
    for shift, summing in ((0, True), (1, False)):
        for step in range(n - 1):
            leaving = chunks[(rank + shift - step) % n]
            place = (rank + shift - step - 1) % n
            arriving = torch.empty_like(chunks[place])
            works = dist.isend(leaving, (rank + 1) % n), dist.irecv(arriving, (rank - 1) % n)
            for work in works:
                work.wait()
            sent += leaving.nbytes
            chunks[place] = chunks[place] + arriving if summing else arriving
    return torch.cat(chunks), sent  # given


def _draw(rng):
    # Chunks of two sizes: only then do all known mistakes send another number of bytes.
    size = N_RANKS * int(rng.integers(1, 3)) + int(rng.integers(1, N_RANKS))
    return ([rng.integers(-40, 41, size) / 4 for _ in range(N_RANKS)],)


def _case(size, source):
    arrays = [10.0**rank * np.arange(1, size + 1) for rank in range(N_RANKS)]
    return Case((arrays,), RING.expect(arrays), source)


def _is_about_arrays(mistake):
    return "float64" in mistake.name or "remainder" in mistake.name


EXERCISES = (
    Exercise(
        chapter=1,
        solution=ring_by_messages,
        expect=RING.expect,
        route=RING.route,
        draw=_draw,
        cases=(
            _case(4, "1111 times 1 to 4; 3 x 2 chunks of 8 bytes"),
            _case(6, "1111 times 1 to 6, in chunks of 2, 2, 1 and 1"),
        ),
        # The others cannot happen where tensor_split cuts and tensors keep their dtype.
        misconceptions=tuple(m for m in RING.misconceptions if not _is_about_arrays(m)),
        parts=("results", "sent"),
        tolerance=RING.tolerance,
        why_tolerance=RING.why_tolerance,
        n_random=2,
        n_ranks=N_RANKS,
    ),
)
