"""`check_answer`: a reply to what a reader answers to a "Check yourself" question."""

import numbers
import textwrap

from parlab.exercises.progress import note_done
from parlab.exercises.question_bank import QUESTIONS
from parlab.exercises.report import WIDTH
from parlab.units import require_choice


def check_answer(name, answer=...):
    """Print a reply to the answer of a "Check yourself" question, or the question itself.

    name: the question's, such as "1.1". answer: a number in the unit that the question names, or
    the letter of a choice; with ... it prints the question. A right one is noted for `progress`.

    >>> check_answer("1.1")
    1.1  A ring all-reduce of 1 GB on 8 GPUs: how many GB does each GPU send?
         Your answer, in GB, in place of the dots.
    >>> check_answer("1.1", 0.875)
    1.1  Not yet. That is one phase. After the reduce-scatter comes the all-gather.

    Raises ValueError for a name that no question has.
    """
    name = require_choice("name", name, QUESTIONS)
    question = QUESTIONS[name]
    if answer is None or answer is ...:
        _print(name, *_asked(question))
        return
    is_right, reply = judge(question, answer)
    _print(name, reply)
    if is_right:
        note_done("questions", name)


def judge(question, answer):
    """Return whether an answer is right, and the reply to it."""
    if question.choices:
        return _judge_choice(question, answer)
    number = _number(answer)
    if number is None:
        return False, f"A number is asked for, in {question.unit or 'no unit'}; got {answer!r:.40}."
    right = question.answer()
    if _close(number, right, question):
        return True, f"Yes: {right:.4g} {question.unit}".rstrip() + f". {question.why()}"
    for wrong, reply in question.replies:
        if _close(number, wrong() if callable(wrong) else wrong, question):
            return False, f"Not yet. {reply}"
    for power in (3, 6, 9, -3, -6, -9, 2, -2):
        if _close(number, right * 10.0**power, question):
            unit = f"in {question.unit}" if question.unit else "as a plain number"
            return False, f"The right digits, in another unit: the answer is wanted {unit}."
    return False, "Not yet, and not one of the usual slips either."


def _judge_choice(question, answer):
    letter = str(answer).strip().lower()
    if letter not in question.choices:
        return False, f"Answer with one of the letters {', '.join(question.choices)}."
    if letter == question.answer:
        return True, f"Yes. {question.why()}"
    return False, f"Not yet. {dict(question.replies)[letter]}"


def _asked(question):
    yield question.text
    for letter, text in (question.choices or {}).items():
        yield f"{letter}) {text}"
    unit = f"in {question.unit}" if question.unit else "a number"
    yield f"Your answer, {'a letter' if question.choices else unit}, in place of the dots."


def _print(name, *lines):
    """Print lines behind the question's name, broken where they are long."""
    indent = " " * (len(name) + 2)
    for number, line in enumerate(lines):
        first = indent if number else f"{name}  "
        print(textwrap.fill(line, WIDTH, initial_indent=first, subsequent_indent=indent))


def _number(answer):
    if isinstance(answer, str):
        try:
            return float(answer)
        except ValueError:
            return None
    value = answer.item() if getattr(answer, "ndim", None) == 0 else answer
    return float(value) if isinstance(value, numbers.Real) and value is not True else None


def _close(number, right, question):
    return abs(number - right) <= question.tolerance * abs(right)
