"""Wrong programs for every exercise, made from the reference solutions by `exercise_bugs.txt`."""

import inspect
import sys
from itertools import groupby
from pathlib import Path

from parlab.exercises.catalogue import EXERCISES


def read_bugs():
    """Return {exercise: [(mistake, [(old text, new text), ...]), ...]}."""
    bugs = {}
    lines = (Path(__file__).parent / "exercise_bugs.txt").read_text(encoding="utf-8").splitlines()
    for mark, group in groupby(lines[lines.index("=== ring_all_reduce") :], key=lambda s: s[:1]):
        text = [line[2:] for line in group]
        if mark == "=":
            of_exercise = bugs.setdefault(text[0].split()[1], [])
        elif mark == "m":
            edits = []
            of_exercise.append((text[0].partition(": ")[2], edits))
        elif mark == "-":
            old = "\n".join(text)
        elif mark == "+":
            edits.append((old, "\n".join(text)))
    return bugs


BUGS = read_bugs()


def buggy(exercise, edits):
    """Return the reference solution with each old text replaced by its new one, in turn."""
    solution = EXERCISES[exercise].solution
    docstring, code = split_off_docstring(inspect.getsource(solution))
    for old, new in edits:
        assert old in code, f"{exercise} has no {old!r}"
        code = code.replace(old, new)
    namespace = dict(vars(sys.modules[solution.__module__]))
    exec(compile(docstring + code, f"<{exercise} with a bug>", "exec"), namespace)
    return namespace[solution.__name__]


def split_off_docstring(source):
    end = source.index('"""', source.index('"""') + 3) + 3
    return source[:end], source[end:]
