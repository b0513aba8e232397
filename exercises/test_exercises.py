"""One test an exercise: `pytest exercises`, or with --impl=solution the reference solutions.

Those on real processes are marked "ranks": they need torch and most of the time, and
`-m "not ranks"` leaves them out.
"""

from pathlib import Path

import pytest

from parlab.exercises.catalogue import EXERCISES
from parlab.exercises.grade import grade
from parlab.exercises.progress import note_done
from parlab.exercises.report import report


def parameter(name):
    return pytest.param(name, marks=pytest.mark.ranks if EXERCISES[name].n_ranks else ())


@pytest.mark.parametrize("name", [*map(parameter, EXERCISES)])
def test_exercise(name, functions, is_students, seed):
    if name not in functions:
        pytest.fail(f"{name}: there is no function of this name", pytrace=False)
    verdict = grade(EXERCISES[name], functions[name], seed=seed)
    if not verdict.passed:
        pytest.fail(report(verdict), pytrace=False)
    if is_students:
        note_done("exercises", name, folder=Path(__file__).parent)
