"""python -m parlab.exercises: write a new student.py."""

import argparse
import sys
from pathlib import Path

from parlab.exercises.source import student_file


def main(arguments=None):
    """Write the stubs to a file that is not there yet, or, when forced, over one that is."""
    parser = argparse.ArgumentParser(prog="python -m parlab.exercises", description=main.__doc__)
    parser.add_argument("path", nargs="?", default="student.py", help="default: %(default)s")
    parser.add_argument("--force", action="store_true", help="replace what the file holds")
    chosen = parser.parse_args(arguments)
    path, text = Path(chosen.path), student_file()
    if path.exists() and path.read_text(encoding="utf-8") == text:
        print(f"{path} holds the stubs already")
        return 0
    if path.exists() and not chosen.force:
        print(f"{path} exists and may hold somebody's work: --force replaces it", file=sys.stderr)
        return 1
    path.write_text(text, encoding="utf-8")
    print(f"wrote {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
