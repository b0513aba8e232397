"""The simulated ring beside the memory traffic that it can't avoid, as ratios in one run.

The floor is N row copies (results are fresh), N-1 row additions and N-1 row copies. The
list-of-chunks ring is the version of most tutorials, with a copied message for every send.
"""

import statistics
import time

import numpy as np

import parlab as pl

CASES = ((8, 64e6), (64, 8e6), (256, 256e3))  # ranks, bytes per rank
ROUNDS = 7


def floor(arrays):
    rows = [array.copy() for array in arrays]
    total = rows[0]
    for row in rows[1:]:
        total += row
    for row in rows[1:]:
        row[:] = total
    return rows


def list_of_chunks(arrays):
    n = len(arrays)
    chunks = [[part.copy() for part in np.array_split(array, n)] for array in arrays]
    for t in range(n - 1):
        messages = [(r, (r - t) % n, chunks[r][(r - t) % n].copy()) for r in range(n)]
        for r, c, data in messages:
            chunks[(r + 1) % n][c] += data
    for t in range(n - 1):
        messages = [(r, (r + 1 - t) % n, chunks[r][(r + 1 - t) % n].copy()) for r in range(n)]
        for r, c, data in messages:
            chunks[(r + 1) % n][c] = data
    return [np.concatenate(mine) for mine in chunks]


def seconds(function, arrays):
    start = time.perf_counter()
    function(arrays)
    return time.perf_counter() - start


def main():
    print("simulated ring all-reduce, time over that of its unavoidable row operations")
    print(f"{'ranks':>6}{'each':>9}{'parlab':>9}{'first call':>12}{'list of chunks':>16}")
    for n_ranks, tensor_bytes in CASES:
        rng = np.random.default_rng(0)
        arrays = [rng.random(int(tensor_bytes) // 8) for _ in range(n_ranks)]
        seconds(floor, arrays)  # the first run of anything pays for fresh memory pages
        first = seconds(pl.ring_all_reduce, arrays) / seconds(floor, arrays)
        ratios, naive = [], []
        for _ in range(ROUNDS):  # in turn, so that a busy moment slows both sides of a ratio
            reference = seconds(floor, arrays)
            ratios.append(seconds(pl.ring_all_reduce, arrays) / reference)
            naive.append(seconds(list_of_chunks, arrays) / reference)
        print(
            f"{n_ranks:>6}{pl.format_bytes(tensor_bytes):>9}{statistics.median(ratios):>8.2f}x"
            f"{first:>11.2f}x{statistics.median(naive):>15.2f}x"
        )


if __name__ == "__main__":
    main()
