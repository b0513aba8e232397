"""Judge a learner's function: run the cases, find the smallest failure, recognise the mistake."""

import inspect
import secrets
from dataclasses import dataclass

import numpy as np

from parlab.exercises.apart import run_apart
from parlab.exercises.by_value import CannotSend
from parlab.exercises.compare import difference
from parlab.exercises.outcome import Outcome, call
from parlab.exercises.records import Case, Exercise, Misconception
from parlab.exercises.show import size_of

CHANGED_INPUT = Misconception(
    name="the input is changed in place",
    ways=(),
    reason="What the caller passed is no longer there: on real ranks this would be the gradient or "
    "the activation that somebody else still needs.",
    hint="Work on a copy, and beware of +=, which writes into the array that it is given.",
)


@dataclass(frozen=True)
class Failure:
    """One case that is not right. part: the wrong entry of the answer, None for all of it."""

    case: Case
    outcome: Outcome
    part: int | None
    difference: object = None


@dataclass(frozen=True)
class Verdict:
    """What became of a check.

    status: "passed", "wrong", "not written" or "refused" (never run; `message` says why).
    n_cases, n_right: cases asked, and how many answers were right.
    failures: smallest input first. mistakes: the misconceptions that the answers are.
    seed: of the random cases.
    """

    exercise: Exercise
    status: str
    n_cases: int = 0
    n_right: int = 0
    failures: tuple[Failure, ...] = ()
    mistakes: tuple[Misconception, ...] = ()
    seed: int | None = None
    message: str = ""
    printed_lines: int = 0

    @property
    def passed(self):
        """Whether every answer was right."""
        return self.status == "passed"


def grade(exercise, function, *, seed=None, run=None):
    """Run a function on an exercise's cases, the fixed and the random ones, and return a Verdict.

    seed: of the random cases; None takes a new one. run: how to call the function, by default in a
    process of its own, or on as many as the exercise asks for.

    >>> from parlab.exercises.pipeline import PIPELINE_BUBBLE
    >>> grade(PIPELINE_BUBBLE, lambda p, m: (p - 1) / m).mistakes[0].name
    'the other convention: idle over ideal time'
    """
    seed = secrets.randbelow(10**6) if seed is None else seed
    cases = all_cases(exercise, seed)
    refusal = _signature_refusal(exercise, function, cases)
    if refusal:
        return Verdict(exercise, "refused", message=refusal)
    try:
        outcomes = (run or _runner(exercise))(function, [case.args for case in cases])
    except CannotSend as error:
        return Verdict(exercise, "refused", message=_cannot_send(error))
    except ImportError as error:  # of torch, which exercises on ranks need
        return Verdict(exercise, "refused", message=str(error))
    failures = [
        failure
        for case, outcome in zip(cases, outcomes, strict=False)
        for failure in _failures(exercise, case, outcome)
    ]
    wrong = {id(failure.case) for failure in failures}
    answered = {
        "exercise": exercise,
        "n_cases": len(cases),
        "n_right": len(outcomes) - len(wrong),
        "failures": tuple(failures),
        "seed": seed,
        "printed_lines": sum(outcome.printed_lines for outcome in outcomes),
    }
    if not failures:
        return Verdict(status="passed", **answered)
    if all(map(_is_unwritten, outcomes)):
        return Verdict(status="not written", **answered)
    mistakes = diagnose(exercise, cases, outcomes, failures)
    return Verdict(status="wrong", mistakes=tuple(mistakes), **answered)


def all_cases(exercise, seed):
    """The fixed cases and the random ones of a seed, smallest input first."""
    rng = np.random.default_rng(seed)
    drawn = [exercise.draw(rng) for _ in range(exercise.n_random)]
    random = [Case(args, exercise.expect(*args), exercise.route) for args in drawn]
    return sorted([*exercise.cases, *random], key=lambda case: size_of(case.args))


def run_here(function, calls):
    """Call a function that is known to return in this process; otherwise as `run_apart`."""
    return [call(function, args) for args in calls]


def diagnose(exercise, cases, outcomes, failures):
    """Return the misconceptions that explain the wrong parts of all answers.

    A mistake is recognised only if one of its ways gives the learner's answer on every case, right
    or wrong, the random ones included.
    """
    found = []
    if any(failure.outcome.changed is not None for failure in failures):
        found.append(CHANGED_INPUT)
    are_answers = any(f.difference or f.outcome.kind == "raised" for f in failures)
    if len(outcomes) < len(cases) or not are_answers:
        return found
    # Most ways differ from the answer where it is wrong: those cases first saves the rest.
    failed = {id(failure.case) for failure in failures}
    pairs = zip(cases, outcomes, strict=True)
    answers = sorted(pairs, key=lambda answer: id(answer[0]) not in failed)
    # One mistake behind all that is wrong, or else one behind each wrong part.
    whole = _recognised(exercise, None, answers)
    parts = sorted({failure.part for failure in failures if failure.part is not None})
    each = [mistake for part in parts for mistake in _recognised(exercise, part, answers)]
    return found + (whole or list(dict.fromkeys(each)))


def _recognised(exercise, part, answers):
    """The misconceptions of which a way gives all answers; part: or one entry of each of them."""
    return [
        mistake
        for mistake in exercise.misconceptions
        if any(_agrees(exercise, way, part, answers) for way in mistake.ways)
    ]


def _agrees(exercise, way, part, answers):
    for case, outcome in answers:
        known = call(way, case.args)
        if known.kind != outcome.kind or known.error != outcome.error:
            return False
        if known.kind == "raised":
            continue
        ours, theirs = known.value, outcome.value
        if part is not None:
            if not _has_parts(exercise, theirs):
                return False
            ours, theirs = ours[part], theirs[part]
        if difference(theirs, ours, exercise.tolerance, nan_is_equal=True):
            return False
    return True


def _failures(exercise, case, outcome):
    """Every wrong part of one answer."""
    if outcome.kind != "value":
        return [Failure(case, outcome, None)]
    if exercise.parts and _has_parts(exercise, outcome.value):
        pairs = enumerate(zip(outcome.value, case.expected, strict=True))
        found = [(n, difference(got, right, exercise.tolerance)) for n, (got, right) in pairs]
    else:
        found = [(None, difference(outcome.value, case.expected, exercise.tolerance))]
    wrong = [Failure(case, outcome, part, what) for part, what in found if what]
    if not wrong and outcome.changed is not None:
        wrong = [Failure(case, outcome, None)]
    return wrong


def _has_parts(exercise, value):
    return isinstance(value, list | tuple) and len(value) == len(exercise.parts)


def _is_unwritten(outcome):
    returned_nothing = outcome.kind == "value" and outcome.value is None
    return returned_nothing or outcome.error == "NotImplementedError"


def _runner(exercise):
    if not exercise.n_ranks:
        return run_apart
    from parlab.exercises.ranks import run_on_ranks

    return lambda function, calls: run_on_ranks(
        function, calls, exercise.n_ranks, n_parts=len(exercise.parts)
    )


def _signature_refusal(exercise, function, cases):
    wanted = inspect.signature(exercise.solution)
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return None  # a function in C that says nothing about its arguments
    for args in {len(case.args): case.args for case in cases}.values():
        try:
            signature.bind(*args)
        except TypeError:
            return f"it must take {wanted}, but it takes {signature}."
    return None


def _cannot_send(error):
    return (
        "it runs in a process of its own, and something that it uses cannot go there: "
        f"{error}. Create that inside the function, or pass it as an argument."
    )
