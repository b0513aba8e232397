"""Every known mistake is recognised from what a wrong program computes, and nothing else is."""

import secrets
from dataclasses import replace

import numpy as np
import pytest
from exercise_bugs import BUGS, buggy

from parlab.exercises.catalogue import EXERCISES
from parlab.exercises.grade import CHANGED_INPUT, grade, run_here
from parlab.exercises.report import report

SEED = secrets.randbelow(10**6)  # another one in every run; it stands in every failure


def only_random(name):
    """The exercise without its fixed cases, so that nothing is recognised by a stored number."""
    return replace(EXERCISES[name], cases=(), n_random=4 if EXERCISES[name].n_ranks else 48)


def graded(exercise, function):
    """In this process, or on the ranks that the exercise asks for."""
    return grade(exercise, function, seed=SEED, run=None if exercise.n_ranks else run_here)


def names(verdict):
    return [mistake.name for mistake in verdict.mistakes]


def test_there_are_more_than_enough_and_each_has_a_name_a_reason_and_a_hint():
    everything = [(e.name, m) for e in EXERCISES.values() for m in e.misconceptions]
    assert len({(name, mistake.name) for name, mistake in everything}) == len(everything) >= 35
    for _, mistake in everything:
        assert mistake.ways
        assert len(mistake.reason) > 20 and mistake.reason.endswith((".", "?"))
        assert len(mistake.hint) > 8 and mistake.hint.endswith((".", "?"))


@pytest.mark.parametrize("name", EXERCISES)
def test_every_mistake_on_the_list_has_a_wrong_program(name):
    assert {mistake for mistake, _ in BUGS[name]} == {
        m.name for m in EXERCISES[name].misconceptions
    }


@pytest.mark.parametrize(
    "name, mistake, edits",
    [
        pytest.param(name, *bug, id=f"{name}-{bug[0]}")
        for name, bugs in BUGS.items()
        for bug in bugs
    ],
)
def test_a_wrong_program_gets_exactly_its_own_name_on_random_inputs(name, mistake, edits):
    verdict = graded(only_random(name), buggy(name, edits))
    assert (verdict.status, names(verdict)) == ("wrong", [mistake]), f"seed {SEED}"
    text = report(verdict)
    assert f"A known mistake: {mistake}.\n" in text and "\n    Hint: " in text
    assert ("got " in text or "ValueError" in text) and len(text.splitlines()) < 16
    assert "nan" not in text


def off_by_a_little(value):
    """A number on no list."""
    if isinstance(value, np.ndarray):
        return value * 1.0371
    if isinstance(value, list | tuple):
        return type(value)(map(off_by_a_little, value))
    if isinstance(value, dict):
        return {key: off_by_a_little(entry) for key, entry in value.items()}
    return value + "?" if isinstance(value, str) else value if value is None else value * 1.0371


@pytest.mark.parametrize("name", EXERCISES)
def test_an_error_on_no_list_is_called_unknown_and_the_reference_gets_no_name(name):
    exercise, solution = EXERCISES[name], EXERCISES[name].solution

    def wrong(*args):
        return off_by_a_little(solution(*args))

    verdict = graded(exercise, wrong)
    assert (verdict.status, names(verdict)) == ("wrong", []), f"seed {SEED}"
    verdict = graded(exercise, solution)
    assert (verdict.status, verdict.mistakes, verdict.failures) == ("passed", (), ()), (
        f"seed {SEED}"
    )


@pytest.mark.parametrize("name", EXERCISES)
def test_one_wrong_answer_among_right_ones_is_no_known_mistake(name):
    exercise, solution, calls = EXERCISES[name], EXERCISES[name].solution, []
    wrong_call = len(exercise.cases) + 3

    def mostly_right(*args):
        calls.append(args)
        answer = solution(*args)
        return off_by_a_little(answer) if len(calls) == wrong_call else answer

    verdict = graded(exercise, mostly_right)
    assert verdict.n_right in (verdict.n_cases - 1, verdict.n_cases), f"seed {SEED}"
    assert not verdict.mistakes


def first_array(args):
    """The first argument, or the first entry of it, where that is an array."""
    first = args[0][0] if isinstance(args[0], list) else args[0]
    return first if hasattr(first, "dtype") else None


WITH_ARRAYS = [n for n, e in EXERCISES.items() if first_array(e.cases[0].args) is not None]


@pytest.mark.parametrize("name", WITH_ARRAYS)
def test_an_input_changed_in_place_is_named_though_the_answer_is_right(name):
    exercise, solution = EXERCISES[name], EXERCISES[name].solution

    def changes_its_input(*args):
        answer = solution(*args)
        array = first_array(args)
        array += 1
        return answer

    verdict = graded(exercise, changes_its_input)
    assert verdict.mistakes == (CHANGED_INPUT,)
    assert all(failure.outcome.changed == 0 for failure in verdict.failures)


def test_two_mistakes_in_two_parts_of_an_answer_are_both_named():
    edits = [
        ('order.append(f"B{i + 1}")', 'order.append(f"B{m - i}")'),
        ("ahead = min(p - 1 - stage, m)", "ahead = m"),
        ("min(ahead + 1, m)", "p - stage"),
    ]
    function = buggy("one_f_one_b", edits)
    verdict = graded(only_random("one_f_one_b"), function)
    assert names(verdict) == ["GPipe's order", "the peak passes m"]
