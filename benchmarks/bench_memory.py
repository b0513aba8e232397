"""How long the estimates of memory take in plain Python, checks and all items included."""

import itertools
import statistics
import time

import parlab as pl

CONFIG = pl.model("llama-3-8b")
# None comes twice, so no answer about a layer, or about a rank, is remembered.
SEQUENCES, GPUS = itertools.count(1), itertools.count(1)
CASES = {
    "training_memory": lambda: pl.training_memory(
        CONFIG, 2, sequence=8192, n_gpus=64, stage=3, recompute="full"
    ),
    "training_memory, new sequence": lambda: pl.training_memory(
        CONFIG, 2, sequence=next(SEQUENCES), n_gpus=64, stage=3, recompute="full"
    ),
    "training_memory, new number of GPUs": lambda: pl.training_memory(
        CONFIG, 2, sequence=8192, n_gpus=next(GPUS), stage=3, recompute="full"
    ),
    "activation_memory": lambda: pl.activation_memory(CONFIG, 2, sequence=8192),
    "zero_memory": lambda: pl.zero_memory(CONFIG.n_params, 64, 3),
}
ROUNDS, CALLS = 301, 40  # a round is shorter than what the system gives a process at a time


def microseconds(function):
    start = time.perf_counter()
    for _ in range(CALLS):
        function()
    return 1e6 * (time.perf_counter() - start) / CALLS


def main():
    rounds = {name: [] for name in CASES}
    for _ in range(ROUNDS):  # in turn, so that a busy moment slows all
        for name, function in CASES.items():
            rounds[name].append(microseconds(function))
    for name, times in rounds.items():
        tenth, *_ = statistics.quantiles(times, n=10)
        print(f"{name}: median {statistics.median(times):.1f} µs, a tenth below {tenth:.1f}")


if __name__ == "__main__":
    main()
