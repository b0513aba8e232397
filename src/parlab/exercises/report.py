"""A verdict in a few lines. The solution is never among them."""

import inspect
import linecache
import textwrap

from parlab.exercises.apart import LIMIT_S
from parlab.exercises.records import AnyOf
from parlab.exercises.show import show, show_call

WIDTH = 88  # what a page of the book shows without a scroll bar
MOST_LINES = 5  # shown of what a function printed
LONGEST_MESSAGE = 200  # characters of an exception


def report(verdict):
    """Write a Verdict for its reader.

    >>> from parlab.exercises.grade import grade, run_here
    >>> from parlab.exercises.pipeline import PIPELINE_BUBBLE
    >>> print(report(grade(PIPELINE_BUBBLE, lambda p, m: p / m, seed=1, run=run_here)))
    pipeline_bubble: 0 of 21 checks passed.
    Smallest failing input: pipeline_bubble(1, 1)
        the answer: got 1.0
                    expected 0.0
    The mistake is unknown: it is none on the list.
    Random inputs: seed=1 repeats them.
    """
    name = verdict.exercise.name
    if verdict.status == "refused":
        return _fill(f"{name} was not run: {verdict.message}")
    if verdict.status == "not written":
        return f"{name}: not written yet{_returns_nothing(verdict)}."
    if verdict.passed:
        return f"{name}: all {verdict.n_cases} checks passed.{_swallowed(verdict)}"
    failure = verdict.failures[0]
    lines = [f"{name}: {verdict.n_right} of {verdict.n_cases} checks passed."]
    call = show_call(name, failure.case.args)
    lines.append(_fill(f"Smallest failing input: {call}", later="    "))
    lines += [_fill(line, "    ") for line in _what_happened(verdict.exercise, failure)]
    lines += _printed(failure.outcome)
    lines += _mistakes(verdict)
    lines += [f"Random inputs: seed={verdict.seed} repeats them."]
    return "\n".join(lines)


def how_it_ended(outcome):
    """Lines about a call that did not return."""
    if outcome.kind == "endless":
        message = f"no answer after {LIMIT_S:g} s, so it was stopped {outcome.message}".rstrip()
    elif outcome.kind == "died":
        message = f"it ended Python itself: {outcome.message}"
    elif outcome.error == "SystemExit":
        message = "it called exit, which ends the whole program"
    else:
        message = f"{outcome.error}: {outcome.message}" if outcome.message else outcome.error
    lines = [" ".join(message.split())[:LONGEST_MESSAGE]]
    place = outcome.place
    if place is not None:
        text = linecache.getline(place.file, place.line).strip()
        where = f"in {place.function}, line {place.line}"
        lines.append(f"{where}: {text[: WIDTH - len(where) - 6]}" if text else where)
    return lines


def _what_happened(exercise, failure):
    outcome = failure.outcome
    if outcome.kind == "unreadable":
        return [f"it returned {outcome.message}; expected {_expected(exercise, failure)}"]
    if outcome.kind != "value":
        return how_it_ended(outcome)
    if failure.difference is None:
        name = list(inspect.signature(exercise.solution).parameters)[outcome.changed]
        return [f"the answer is right, but {name} is changed after the call"]
    return _got_and_expected(exercise, failure)


def _got_and_expected(exercise, failure):
    got, expected, label = failure.outcome.value, failure.case.expected, "the answer"
    if failure.part is not None:
        got, expected = got[failure.part], expected[failure.part]
        label = exercise.parts[failure.part]
    elif exercise.parts:
        wanted = ", ".join(exercise.parts)
        return [f"expected a tuple ({wanted}), got {show(got)}"]
    path, got_there, expected_there, what = failure.difference
    if isinstance(expected, AnyOf):
        expected = expected.values[0]
    if what:
        return [f"{label}{path}: {what}", f"got {show(got_there)}"]
    room = WIDTH - len(f"    {label}: expected ")
    texts = show(got, room + 1), show(expected, room + 1)
    if path and (max(map(len, texts)) > room or "shape" in "".join(texts)):
        label, texts = label + path, (show(got_there), show(expected_there))
    return [f"{label}: got {texts[0]}", f"{' ' * len(label)}  expected {texts[1]}"]


def _expected(exercise, failure):
    if exercise.parts:
        return f"a tuple ({', '.join(exercise.parts)})"
    return show(failure.case.expected)


def _printed(outcome):
    if not outcome.printed:
        return []
    lines = outcome.printed.splitlines()
    shown = [f"    | {line[: WIDTH - 6]}" for line in lines[:MOST_LINES]]
    total = max(outcome.printed_lines, len(lines))
    left_out = f", the first {MOST_LINES}" if total > MOST_LINES else ""
    return [f"It printed there ({total} line{'s' * (total != 1)}{left_out}):", *shown]


def _swallowed(verdict):
    lines = verdict.printed_lines
    return f" (It printed {lines} lines, not shown.)" if lines else ""


def _returns_nothing(verdict):
    outcome = verdict.failures[0].outcome
    return "; it returns None" if outcome.kind == "value" else ""


def _mistakes(verdict):
    if not verdict.mistakes:
        only_values = verdict.failures[0].outcome.kind == "value"
        return ["The mistake is unknown: it is none on the list."] if only_values else []
    lines = []
    for mistake in verdict.mistakes:
        lines.append(f"A known mistake: {mistake.name}.")
        lines.append(_fill(mistake.reason, "    "))
        lines.append(_fill(f"Hint: {mistake.hint}", "    "))
    return lines


def _fill(text, indent="", later=None):
    later = indent if later is None else later
    return textwrap.fill(text, WIDTH, initial_indent=indent, subsequent_indent=later)
