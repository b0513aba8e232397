"""Seconds that a laptop needs for a step of a 7.5e9-parameter GPT as one of 64 fake ranks."""

import resource
import sys
import time

import parlab as pl
from parlab.distributed import fake_scale

LIMIT_S = 15


def main():
    psi = fake_scale.GPT_7_5B.n_params
    for stage in range(4):
        start, cpu = time.perf_counter(), time.process_time()
        measured = fake_scale.measure(stage)
        seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
        formula = pl.zero_memory_bytes(psi, 64, stage)
        print(
            f"stage {stage}: {seconds:4.1f} s, {cpu:4.1f} s of one core (limit {LIMIT_S} s); "
            f"{measured.after_step.total / 1e9:.3f} GB after the step, "
            f"formula {formula / 1e9:.3f} GB; peak {measured.peak / 1e9:.3f} GB"
        )
    unit = 1 if sys.platform == "darwin" else 1024
    held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    print(f"memory of this process at most {held / 1e9:.2f} GB")


if __name__ == "__main__":
    main()
