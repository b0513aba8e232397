"""One call of a learner's function, and all that came of it."""

import contextlib
import io
import pickle
import sysconfig
import traceback
from pathlib import Path
from typing import NamedTuple

import numpy as np

MOST_PRINTED = 2_000  # characters kept of what a call prints
MOST_RETURNED = 5_000_000  # bytes of a pickled answer
STANDARD_LIBRARY = sysconfig.get_path("stdlib").replace("\\", "/") + "/"
PARLAB = Path(__file__).resolve().parents[1].as_posix() + "/"


class Place(NamedTuple):
    """A line of the learner's code."""

    file: str
    line: int
    function: str


class Outcome(NamedTuple):
    """What a call did: one of these kinds.

    "value": it returned `value`. "raised": `error` is the exception's type, `message` its text.
    "unreadable": it returned something that cannot be looked at, as `message` says.
    "endless": it was stopped. "died": it ended the Python process, as `message` says.

    place: where it stopped, if not by returning. printed, printed_lines: the start of what it
    printed, and how many lines that was. changed: the position of the argument that it changed.
    """

    kind: str
    value: object = None
    error: str = ""
    message: str = ""
    place: Place | None = None
    printed: str = ""
    printed_lines: int = 0
    changed: int | None = None


def call(function, args):
    """Call the function with a copy of the arguments and return the Outcome.

    Nothing that it does comes through: prints are kept, NumPy's warnings are not, and every
    exception, SystemExit included, is a kind of outcome.
    """
    packed = pickle.dumps(args)
    given = pickle.loads(packed)
    printed = _Printed()
    with (
        contextlib.redirect_stdout(printed),
        contextlib.redirect_stderr(_Printed()),
        np.errstate(all="ignore"),
    ):
        try:
            outcome = _readable(function(*given))
        except (Exception, SystemExit) as error:
            places = [
                Place(frame.f_code.co_filename, line, frame.f_code.co_name)
                for frame, line in traceback.walk_tb(error.__traceback__)
            ]
            outcome = Outcome(
                "raised",
                error=type(error).__name__,
                message=str(error)[:MOST_PRINTED],
                place=innermost(places[::-1]),
            )
    return outcome._replace(
        printed=printed.start,
        printed_lines=printed.lines,
        changed=_changed(given, packed),
    )


def is_same(one, other):
    """Whether two values have the same types, shapes and entries, NaN being equal to NaN.

    >>> is_same([1.0, float("nan")], [1.0, float("nan")]), is_same((1, 2), [1, 2])
    (True, False)
    """
    if type(one) is not type(other):
        return False
    if isinstance(one, np.ndarray):
        alike = one.dtype == other.dtype and one.shape == other.shape
        return alike and one.tobytes() == other.tobytes()
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(is_same, one, other))
    return pickle.dumps(one) == pickle.dumps(other)


def innermost(places):
    """The first Place in code that is neither parlab's nor an installed library's; or None."""
    for place in places:
        file = place.file.replace("\\", "/")
        installed = "/site-packages/" in file or "/dist-packages/" in file
        if not installed and not file.startswith(("<frozen", STANDARD_LIBRARY, PARLAB)):
            return place
    return None


class _Printed(io.TextIOBase):
    """A place to print to that keeps only the start."""

    def __init__(self):
        self.start, self.lines = "", 0

    def writable(self):
        return True

    def write(self, text):
        self.start += text[: MOST_PRINTED - len(self.start)]
        self.lines += text.count("\n")
        return len(text)


class _Bounded(io.RawIOBase):
    """A file that refuses to grow beyond what an answer may take."""

    size = 0

    def writable(self):
        return True

    def write(self, data):
        self.size += len(data)
        if self.size > MOST_RETURNED:
            raise OverflowError
        return len(data)


def _readable(value):
    if isinstance(value, tuple):
        value = tuple(value)  # a named tuple's class may exist in the learner's process only
    try:
        pickle.dump(value, _Bounded())
    except OverflowError:
        return Outcome("unreadable", message=f"a {type(value).__name__} of over 5 MB")
    except Exception:
        return Outcome("unreadable", message=f"a {type(value).__name__}")
    return Outcome("value", value)


def _changed(given, packed):
    for position, (after, before) in enumerate(zip(given, pickle.loads(packed), strict=True)):
        if not is_same(after, before):
            return position
    return None
