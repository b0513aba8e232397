"""python -m parlab.ledger: print every figure that we hold ourselves to, worst first."""

import argparse
import os
import sys

from parlab.ledger import ledger, print_entries, print_missed, print_sources, print_summary


def main(arguments=None):
    """Print the ledger: a summary, what is missed and why, and every figure, worst first."""
    parser = argparse.ArgumentParser(prog="python -m parlab.ledger", description=main.__doc__)
    parser.add_argument("--sources", action="store_true", help="also print where figures come from")
    parser.add_argument(
        "--check", action="store_true", help="exit with 1 if a miss is larger than its explanation"
    )
    chosen = parser.parse_args(arguments)
    entries = ledger()
    for title, show in (
        ("", print_summary),
        ("\nMissed, and why\n", print_missed),
        ("\nAll figures, worst first\n", print_entries),
        ("\nSources\n", print_sources if chosen.sources else None),
    ):
        if show:
            print(title, end="\n" if title else "")
            show(entries)
    unexplained = [entry.id for entry in entries if entry.unexplained]
    if chosen.check and unexplained:
        print(f"missed without explanation: {', '.join(unexplained)}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    try:
        code = main()
        sys.stdout.flush()
    except BrokenPipeError:
        # `| head` has seen enough. Python flushes once more at its end, and must find no pipe.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    sys.exit(code)
