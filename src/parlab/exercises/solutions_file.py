"""Read a file of solutions, such as student.py, without trusting it to be well-behaved."""

import importlib.util
import sys
from pathlib import Path

from parlab.exercises.apart import run_apart
from parlab.exercises.catalogue import EXERCISES
from parlab.exercises.report import how_it_ended


class CannotLoad(Exception):
    """The file is missing, or fails while it is loaded; `args[0]` says how."""


def functions_in(path):
    """Return {name: function} for the exercises that a file solves, or tries to.

    Raises CannotLoad, with the file's own error and line, also where loading it would not end.
    """
    path = Path(path).resolve()
    if not path.is_file():
        raise CannotLoad(f"there is no file {path}")
    # First in a process of its own, which may loop or exit.
    (outcome,) = run_apart(_can_load, [(str(path),)])
    if outcome.kind != "value":
        raise CannotLoad("\n    ".join([f"{path.name} cannot be loaded:", *how_it_ended(outcome)]))
    loaded = vars(_load(path))
    return {name: loaded[name] for name in EXERCISES if callable(loaded.get(name))}


def _load(path):
    path = Path(path)
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _can_load(path):
    _load(path)
