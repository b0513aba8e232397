"""`check`: grade an exercise where it was written, in a notebook as in a script."""

import parlab
from parlab.exercises.catalogue import EXERCISES
from parlab.exercises.grade import Verdict, grade
from parlab.exercises.progress import note_done
from parlab.exercises.report import report
from parlab.units import require_choice


class Checked:
    """What `check` returns: `passed`, `args` of the smallest failing input, and the `verdict`."""

    def __init__(self, verdict):
        self.verdict = verdict

    @property
    def passed(self):
        """Whether every answer was right."""
        return self.verdict.passed

    @property
    def args(self):
        """Arguments of the smallest failing input, to try by hand; None where there is none."""
        return self.verdict.failures[0].case.args if self.verdict.failures else None

    def __repr__(self):
        return f"<{self.verdict.exercise.name}: {self.verdict.status}>"

    def _ipython_display_(self):
        """Show nothing below a cell that ends with `check`: its lines are printed already."""


def check(function, *, seed=None):
    """Grade your solution of an exercise, which is found by the function's name, and print how.

    The function runs on fixed and on random inputs, in a process of its own that is stopped after
    5 s (`parlab.exercises.apart` says why). Its globals and what it closes over go with it. Where
    it is wrong, the smallest failing input is printed, and, if all its answers are those of a known
    mistake, that mistake with a reason and a hint. A pass is noted for `progress`.

    seed: of the random inputs, to repeat those of an earlier check; None draws new ones.

    Returns a Checked, with `.passed` and `.args`. Raises TypeError for something without a name,
    ValueError for a name that no exercise has.

    >>> def pipeline_bubble(stages, micro_batches):
    ...     return (stages - 1) / micro_batches
    >>> check(pipeline_bubble, seed=1).passed
    pipeline_bubble: 1 of 21 checks passed.
    Smallest failing input: pipeline_bubble(2, 1)
        the answer: got 1.0
                    expected 0.5
    A known mistake: the other convention: idle over ideal time.
        (p-1)/m divides the idle time by the time of the work alone. Papers use it too, but
        it is no share of the run: for p > m + 1 it passes 1.
        Hint: Divide by the time that the schedule really takes, from the first to the last
        action.
    Random inputs: seed=1 repeats them.
    False
    """
    if not callable(function) or not hasattr(function, "__name__"):
        raise TypeError(f"function must be the function itself, got {function!r:.60}")
    name = require_choice("the function's name", function.__name__, EXERCISES)
    if function in (EXERCISES[name].solution, getattr(parlab, name, None)):
        message = f"this is parlab's own {name}. Write yours, and check that."
        verdict = Verdict(EXERCISES[name], "refused", message=message)
    else:
        verdict = grade(EXERCISES[name], function, seed=seed)
    print(report(verdict))
    if verdict.passed:
        note_done("exercises", name)
    return Checked(verdict)
