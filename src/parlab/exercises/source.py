"""Stubs and solutions as text, both from the source of the reference, so that they cannot drift."""

import inspect
import re

from parlab.exercises.catalogue import EXERCISES
from parlab.units import require_choice

GIVEN = re.compile(r"  # given$")
GAP = "# Your code here."

HEADER = '''"""Your solutions: `pytest exercises` tests all of them, `pl.check(function)` one.

Those that begin with `import torch` run on several processes; `pytest exercises -m "not ranks"`
leaves them out.

Replace `raise NotImplementedError` in each function. What stands around it is given, and yours to
change. Numbers are bytes, seconds and bytes/s.
"""

import math

import numpy as np

from parlab import gelu'''


def solution_text(name):
    """Return the reference solution of an exercise, ready to print.

    >>> print(solution_text("bubble_of_ideal").splitlines()[-1])
        return (stages - 1) / micro_batches
    """
    lines = _lines(name)
    return "\n".join(GIVEN.sub("", line) for line in lines) + "\n"


def stub_text(name):
    """Return what a learner starts from: signature, docstring, and the lines that are given.

    >>> print("\\n".join(stub_text("ring_all_gather").splitlines()[-5:]))
        \"""
        n = len(shards)
        sent = [0] * n
        # Your code here.
        raise NotImplementedError
    """
    lines = _lines(name)
    _, body = _docstring(lines)
    stub, in_gap = lines[:body], False
    for line in lines[body:]:
        if GIVEN.search(line):
            stub.append(GIVEN.sub("", line))
            in_gap = False
        elif not in_gap and line:
            stub += [f"    {GAP}", "    raise NotImplementedError"]
            in_gap = True
        elif not in_gap:  # a blank line between given ones
            stub.append(line)
    return "\n".join(stub) + "\n"


def notebook_cells(name):
    """Return an exercise for a notebook: its text as Markdown, and a short cell with the check.

    >>> markdown, code = notebook_cells("bubble_of_ideal")
    >>> print(code)
    def bubble_of_ideal(stages, micro_batches):
        # Your code here.
        raise NotImplementedError
    <BLANKLINE>
    <BLANKLINE>
    pl.check(bubble_of_ideal)
    """
    lines = stub_text(name).splitlines()
    start, end = _docstring(lines)
    code = "\n".join(lines[:start] + lines[end:]) + f"\n\n\npl.check({name})"
    return f"**{name}.** " + _as_markdown(inspect.getdoc(EXERCISES[name].solution)), code


def student_file():
    """Return the text of a new `student.py`: all stubs, chapter by chapter."""
    parts, chapter = [HEADER], None
    for name, exercise in EXERCISES.items():
        if exercise.chapter != chapter:
            chapter = exercise.chapter
            parts.append(f"# Chapter {chapter}\n")
        parts.append(stub_text(name))
    return "\n\n".join(parts)


def _lines(name):
    name = require_choice("name", name, EXERCISES)
    return inspect.getsource(EXERCISES[name].solution).rstrip().splitlines()


def _docstring(lines):
    """The first line of the docstring, which every solution has, and the line after its end."""
    first, last = (number for number, line in enumerate(lines) if '"""' in line)
    return first, last + 1


def _as_markdown(text):
    """A docstring with its examples and tables as blocks of code."""
    blocks = []
    for block in text.split("\n\n"):
        if block.startswith(">>>"):
            blocks.append(f"```python\n{block}\n```")
        elif block.startswith("    "):
            blocks.append(f"```text\n{inspect.cleandoc(block)}\n```")
        else:
            blocks.append(block)
    return "\n\n".join(blocks)
