"""What exercises and questions are: plain records, which the files of the topics fill."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple


class Case(NamedTuple):
    """One call of the learner's function, its right answer, and where that answer comes from."""

    args: tuple
    expected: object
    source: str


class AnyOf(NamedTuple):
    """An expected value of which several forms are right, such as a ring's two conventions."""

    values: tuple


class Misconception(NamedTuple):
    """A known mistake. A wrong answer is this one if it equals what one of `ways` computes.

    ways: functions of the exercise's arguments. Several where a mistake has several forms.
    reason: why it is wrong, in a sentence or two. hint: the next step, without the solution.
    """

    name: str
    ways: tuple[Callable, ...]
    reason: str
    hint: str


@dataclass(frozen=True, kw_only=True)
class Exercise:
    """All that is known about one exercise.

    chapter: the number of the chapter with its "Your turn".
    solution: the reference. Its source gives the stub (lines that end in "# given" stay) and the
        printed solution; its name is the exercise's.
    expect: the arguments to the right answer, by another route than the solution's.
    route: what that other route is.
    draw: a random generator to the arguments of one random case.
    cases: fixed cases, besides the random ones.
    misconceptions: the mistakes that are recognised.
    parts: names of the entries where the answer is a tuple; each is judged for itself.
    tolerance: relative, for floats; 0 asks for equal numbers. why_tolerance: where it is not 0.
    n_random: how many random cases a check draws.
    n_ranks: processes of a case; 0 for a function that needs none. With ranks the function is
        called on each of them, with tensors for arrays, and the answer is the list of what they
        return; where it has parts, each part is such a list.
    """

    chapter: int
    solution: Callable
    expect: Callable
    route: str
    draw: Callable
    cases: tuple[Case, ...]
    misconceptions: tuple[Misconception, ...]
    parts: tuple[str, ...] = ()
    tolerance: float = 0.0
    why_tolerance: str = ""
    n_random: int = 16
    n_ranks: int = 0

    def __post_init__(self):
        if bool(self.tolerance) != bool(self.why_tolerance):
            raise ValueError(f"{self.name} must have tolerance and why_tolerance, or neither")

    @property
    def name(self):
        """The function's name, by which it is found."""
        return self.solution.__name__


@dataclass(frozen=True, kw_only=True)
class Question:
    """One question of a chapter.

    answer: computes the right number, in `unit`; or names the right one of the choices.
    why: the reply to the right answer, with numbers of its own.
    replies: pairs of an expected wrong answer (a number, a function that computes one, or a
        choice) and what to say to it.
    choices: {letter: text}; empty where a number is asked for.
    tolerance: relative.
    """

    chapter: int
    text: str
    answer: Callable | str
    why: Callable
    replies: tuple = ()
    unit: str = ""
    choices: dict | None = None
    tolerance: float = 0.01
