"""What `import parlab` adds to starting Python, and what it loads."""

import statistics
import subprocess
import sys
import time

ROUNDS = 21
HEAVY = ("numpy", "torch", "matplotlib", "ipywidgets")


def seconds(code):
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True)
    return time.perf_counter() - start


def main():
    added = []
    for _ in range(ROUNDS):  # in turn, so that a busy moment slows both
        bare = seconds("pass")
        added.append(seconds("import parlab") - bare)
    code = f"import sys, parlab; print([name for name in {HEAVY} if name in sys.modules])"
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    print(
        f"import parlab: {1e3 * statistics.median(added):.1f} ms over bare Python, "
        f"loading {loaded.stdout.strip()} of {', '.join(HEAVY)}"
    )


if __name__ == "__main__":
    main()
