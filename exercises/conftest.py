"""Which solutions are tested: the learner's student.py, or the reference solutions."""

import os
import secrets
from pathlib import Path

import pytest

from parlab.exercises.catalogue import EXERCISES
from parlab.exercises.solutions_file import CannotLoad, functions_in

HERE = Path(__file__).resolve().parent

collect_ignore = ["student.py"]  # the examples in its docstrings do not work yet


def pytest_addoption(parser):
    parser.addoption(
        "--impl",
        default=os.environ.get("LAB_MODULE", "student"),
        help="what to test: student, solution, or the path of a file (or LAB_MODULE=...)",
    )
    parser.addoption(
        "--seed",
        type=int,
        default=secrets.randbelow(10**6),
        help="of the random inputs, to repeat those of an earlier run",
    )


def pytest_configure(config):
    config.addinivalue_line("markers", "ranks: an exercise on real processes, which needs torch")


def pytest_report_header(config):
    return f"exercises: {config.getoption('--impl')}, random inputs of --seed={_seed(config)}"


def _seed(config):
    return config.getoption("--seed")


@pytest.fixture
def seed(pytestconfig):
    return _seed(pytestconfig)


@pytest.fixture(scope="session")
def is_students(pytestconfig):
    """Whether it is the learner's own file that is tested."""
    return pytestconfig.getoption("--impl") == "student"


@pytest.fixture(scope="session")
def functions(pytestconfig, is_students):
    """{name: function} of what is tested."""
    chosen = pytestconfig.getoption("--impl")
    if chosen == "solution":
        return {name: exercise.solution for name, exercise in EXERCISES.items()}
    why_not = None
    try:
        return functions_in(HERE / "student.py" if is_students else chosen)
    except CannotLoad as error:
        why_not = str(error)
    pytest.fail(why_not, pytrace=False)
