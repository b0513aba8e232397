"""The grader is calm: whatever a learner's function does, a few lines come back in bounded time."""

import functools
import os
import pickle
import subprocess
import sys
import textwrap
import threading
import time
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pytest
from exercise_bugs import buggy

from parlab.exercises import by_value
from parlab.exercises.apart import LIMIT_S, _end, run_apart
from parlab.exercises.catalogue import EXERCISES
from parlab.exercises.check import check
from parlab.exercises.compare import difference
from parlab.exercises.grade import grade, run_here
from parlab.exercises.outcome import call
from parlab.exercises.records import AnyOf
from parlab.exercises.report import report


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where progress is noted


def lines_of(name, function, **options):
    return report(grade(EXERCISES[name], function, **options))


def is_running(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0] != "Z"


# What a function may do instead of answering.


def test_an_endless_loop_is_stopped_within_10_seconds_and_no_process_is_left(tmp_path, capsys):
    note = str(tmp_path / "pid")

    def pipeline_bubble(stages, micro_batches):
        with open(note, "w") as file:
            file.write(str(os.getpid()))
        while True:
            try:
                while True:
                    pass
            except BaseException:
                pass

    before = time.monotonic()
    assert not check(pipeline_bubble).passed
    assert LIMIT_S < time.monotonic() - before < 10
    printed = capsys.readouterr().out
    assert "no answer after 5 s, so it was stopped" in printed
    assert "in pipeline_bubble, line" in printed and printed.count("\n") < 8
    with open(note) as file:
        assert not is_running(int(file.read()))


def test_a_long_call_into_c_is_stopped_too_and_names_its_line():
    def sleeps(seconds):
        time.sleep(seconds)

    before = time.monotonic()
    (outcome,) = run_apart(sleeps, [(1000,)], limit_s=0.5)
    assert time.monotonic() - before < 10
    assert (outcome.kind, outcome.place.function) == ("endless", "sleeps")


@pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="looks at processes by /proc")
def test_nothing_outlives_a_killed_kernel(tmp_path):
    note = tmp_path / "pid"
    program = f"""
        import os
        from parlab.exercises.apart import run_apart
        def f():
            with open({str(note)!r}, "w") as file:
                file.write(str(os.getpid()))
            while True:
                pass
        run_apart(f, [()], limit_s=2)
    """
    kernel = subprocess.Popen([sys.executable, "-c", textwrap.dedent(program)])
    deadline = time.monotonic() + 30
    while not (note.exists() and note.read_text()) and time.monotonic() < deadline:
        time.sleep(0.05)
    kernel.kill()
    kernel.wait()
    pid = int(note.read_text())
    while is_running(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_running(pid)


def returns_as_many_as(n):
    if n == 3:
        while True:
            pass
    return n


def test_answers_before_an_endless_one_are_kept():
    outcomes = run_apart(returns_as_many_as, [(1,), (2,), (3,), (4,)], limit_s=0.5)
    assert [(o.kind, o.value) for o in outcomes] == [("value", 1), ("value", 2), ("endless", None)]


def leave(way):
    if way == "exit":
        sys.exit("bye")
    if way == "os._exit":
        os._exit(3)
    if way == "kill":
        os.kill(os.getpid(), 9)
    if way == "recursion":
        return leave(way)
    if way == "input":
        return input("your answer? ")
    if way == "memory":
        return np.ones(10**12)
    if way == "huge":
        return np.ones(10**6)
    if way == "generator":
        return (i for i in range(3))
    if way == "thread":
        threading.Thread(target=time.sleep, args=(1000,)).start()
    if way == "prints":
        print("x" * 10**7)
        print("y\n" * 50, file=sys.stderr)
        os.write(1, b"straight to the file")
    return 1


@pytest.mark.parametrize(
    "way, kind, message",
    [
        ("exit", "raised", "bye"),
        ("os._exit", "died", "it ended with exit code 3"),
        ("kill", "died", "it was ended by SIGKILL"),
        ("recursion", "raised", "maximum recursion depth exceeded"),
        ("input", "raised", "EOF when reading a line"),
        ("memory", "raised", "Unable to allocate"),
        ("huge", "unreadable", "a ndarray of over 5 MB"),
        ("generator", "unreadable", "a generator"),
        ("thread", "value", ""),
        ("prints", "value", ""),
    ],
)
def test_a_function_that_does_not_answer_has_an_outcome_all_the_same(way, kind, message):
    before = time.monotonic()
    (outcome,) = run_apart(leave, [(way,)])
    assert time.monotonic() - before < 10
    assert outcome.kind == kind
    assert message in outcome.message
    assert len(outcome.printed) <= 2000


def test_the_reader_presses_stop_and_the_process_ends(tmp_path):
    note = str(tmp_path / "pid")

    def loops():
        with open(note, "w") as file:
            file.write(str(os.getpid()))
        os.kill(os.getppid(), 2)
        time.sleep(1000)

    with pytest.raises(KeyboardInterrupt):
        run_apart(loops, [()])
    with open(note) as file:
        assert not is_running(int(file.read()))


def test_an_interrupt_at_the_worst_moment_does_not_hold_up_the_kernel():
    command = [sys.executable, "-c", "input()"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    process._waitpid_lock.acquire()  # where Popen.wait had it, and could not give it back
    before = time.monotonic()
    _end(process)
    assert time.monotonic() - before < 10
    assert not is_running(process.pid)
    process._waitpid_lock.release()
    process.wait()
    process.stdin.close()


# What it uses goes with it.

FACTOR = 3


class Pair(NamedTuple):
    one: int
    two: int


@dataclass(frozen=True)
class Box:
    content: int

    @property
    def double(self):
        return 2 * self.content

    @staticmethod
    def of(content):
        return Box(content)


@functools.lru_cache(maxsize=5)
def fibonacci(n):
    return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)


def helper(x, *, plus=1):
    return FACTOR * x + plus


def uses_everything(x, plus=10, *, times=2):
    pair, box = Pair(x, helper(x)), Box.of(x)
    arrays = [np.linalg.norm(np.array([3.0, 4.0])), os.path.join("a", "b")]
    return tuple(pair), box.double, times * plus, fibonacci(10), arrays[0], arrays[1]


def make_counter():
    count = 0

    def even(n):
        nonlocal count
        count += 1
        return True if n == 0 else odd(n - 1)

    def odd(n):
        return False if n == 0 else even(n - 1)

    return even


def test_globals_helpers_classes_and_modules_of_the_learner_go_with_the_function():
    function = pickle.loads(by_value.dumps(uses_everything))
    assert function is not uses_everything
    assert function(5) == uses_everything(5) == ((5, 16), 10, 20, 55, 5.0, os.path.join("a", "b"))
    assert run_apart(uses_everything, [(5,)])[0].value == uses_everything(5)


def test_a_named_tuple_of_the_learner_comes_back_as_a_tuple_and_another_class_by_name():
    pair, box = run_apart(lambda kind: Pair(1, 2) if kind == "pair" else Box(1), [("pair",), ("",)])
    assert (pair.kind, pair.value, type(pair.value)) == ("value", (1, 2), tuple)
    assert (box.kind, box.message) == ("unreadable", "a Box")


def test_closures_that_call_each_other_work():
    assert [outcome.value for outcome in run_apart(make_counter(), [(10,), (7,)])] == [True, False]


def test_what_cannot_go_is_named():
    lock = threading.Lock()

    def pipeline_bubble(stages, micro_batches):
        with lock:
            return 0

    assert "cannot pickle" in lines_of("pipeline_bubble", pipeline_bubble)


def test_a_global_that_cannot_go_is_named(tmp_path):
    log = open(tmp_path / "log", "w")  # noqa: SIM115
    source = "def pipeline_bubble(stages, micro_batches):\n    log.write('x')"
    namespace = {"log": log, "__name__": "__main__"}
    exec(source, namespace)
    text = lines_of("pipeline_bubble", namespace["pipeline_bubble"])
    log.close()
    assert "log (TextIOWrapper)" in text and "inside the function" in text


# What is said about it.


def test_a_stub_is_not_written_yet_with_what_stands_before_the_gap_at_work():
    def raises(stages, micro_batches):
        idle = stages - 1  # noqa: F841
        raise NotImplementedError

    def returns_nothing(stages, micro_batches):
        (stages - 1) / (micro_batches + stages - 1)

    said = [lines_of("pipeline_bubble", f, run=run_here) for f in (raises, returns_nothing)]
    assert said == [
        "pipeline_bubble: not written yet.",
        "pipeline_bubble: not written yet; it returns None.",
    ]


def test_an_exception_is_shown_by_its_message_and_line_without_a_traceback():
    def pipeline_bubble(stages, micro_batches):
        names = ["a"]
        return names[stages]

    text = lines_of("pipeline_bubble", pipeline_bubble, seed=1)
    assert text.splitlines() == [
        "pipeline_bubble: 0 of 21 checks passed.",
        "Smallest failing input: pipeline_bubble(1, 1)",
        "    IndexError: list index out of range",
        f"    in pipeline_bubble, line {pipeline_bubble.__code__.co_firstlineno + 2}: "
        "return names[stages]",
        "Random inputs: seed=1 repeats them.",
    ]


def test_prints_are_shown_for_the_failing_input_and_else_only_counted():
    def shows(stages, micro_batches):
        for number in range(20):
            print("number", number)
        return -1 if stages == 8 else (stages - 1) / (micro_batches + stages - 1)

    def right(stages, micro_batches):
        print("here")
        return (stages - 1) / (micro_batches + stages - 1)

    text = lines_of("pipeline_bubble", shows, run=run_here)
    assert "It printed there (20 lines, the first 5):\n    | number 0\n" in text
    assert text.count("| number") == 5
    assert lines_of("pipeline_bubble", right, run=run_here).endswith(
        "checks passed. (It printed 21 lines, not shown.)"
    )


@pytest.mark.parametrize(
    "answer, said",
    [
        ("text", "a number is expected"),
        (None, "a number is expected"),
        (True, "a number is expected"),
        ([0.5], "a number is expected"),
        (float("nan"), "got nan"),
        (1j, "a number is expected"),
    ],
    ids=str,
)
def test_a_wrong_type_is_named(answer, said):
    def function(stages, micro_batches):
        return 0.0 if stages == 1 else answer

    assert said in lines_of("pipeline_bubble", function, run=run_here)


def test_a_tuple_with_an_entry_too_many_is_named():
    text = lines_of("ring_all_reduce", lambda arrays: [1, 2, 3], run=run_here)
    assert "expected a tuple (results, sent), got " in text


def test_the_smallest_failing_input_comes_first_with_got_and_expected():
    def ring_all_reduce(arrays):
        results, sent = EXERCISES["ring_all_reduce"].solution(arrays)
        return results, [size + 1 for size in sent] if len(arrays) > 2 else sent

    verdict = grade(EXERCISES["ring_all_reduce"], ring_all_reduce, run=run_here)
    smallest = min(sum(a.size for a in f.case.args[0]) for f in verdict.failures)
    assert sum(a.size for a in verdict.failures[0].case.args[0]) == smallest
    text = report(verdict)
    assert "    sent: got [" in text and "          expected [" in text


@pytest.mark.parametrize("name", [name for name, e in EXERCISES.items() if not e.n_ranks])
def test_a_report_fits_the_page_and_ends_after_a_few_lines(name):
    exercise = EXERCISES[name]

    def much(*args):
        print("x" * 200)
        answer = exercise.solution(*args)
        return type(answer)(list(answer) * 2) if isinstance(answer, list | tuple) else "y" * 200

    def fails(*args):
        raise RuntimeError("no " * 200)

    for function in (much, fails):
        lines = lines_of(name, function, run=run_here).splitlines()
        assert max(map(len, lines)) <= 88
        assert len(lines) < 12


def test_a_large_array_is_shown_by_the_first_entry_that_differs():
    def column_parallel(x, w_shards):
        return np.concatenate([x @ w for w in w_shards], axis=1) + 1e-3 * (len(x) > 4)

    text = lines_of("column_parallel", column_parallel, run=run_here)
    assert "column_parallel(array of shape (5, 12), [array of shape (12, 2)," in text
    assert "the answer[0][0]: got " in text


def test_parameters_may_have_other_names_and_defaults_but_not_another_number():
    def renamed(p, m, extra=0):
        return (p - 1) / (m + p - 1)

    assert grade(EXERCISES["pipeline_bubble"], renamed, run=run_here).passed
    assert lines_of("pipeline_bubble", lambda p: 0) == (
        "pipeline_bubble was not run: it must take (stages, micro_batches), but it takes (p)."
    )


def test_a_report_never_holds_the_solution():
    for name, exercise in EXERCISES.items():
        text = lines_of(name, lambda *args: 12345, run=run_here)
        from parlab.exercises.source import solution_text, stub_text

        written = set(solution_text(name).splitlines()) - set(stub_text(name).splitlines())
        assert written
        assert not [line for line in written if len(line.strip()) > 12 and line.strip() in text]
        assert exercise.name in text


def test_the_seed_repeats_the_random_inputs_and_without_one_they_change():
    exercise = EXERCISES["data_parallel_grad"]

    def inputs(seed):
        verdict = grade(exercise, lambda *args: 0, seed=seed, run=run_here)
        return verdict.seed, [failure.case.args[0].tolist() for failure in verdict.failures]

    assert inputs(5) == inputs(5) != inputs(6)
    assert inputs(None) != inputs(None)


# Several right answers.

RING_OF_PARLAB = [("(0, True), (1, False)", "(-1, True), (0, False)")]
TO_THE_LEFT = [("+ shift - step", "- shift + step"), ("(rank + 1) % n", "(rank - 1) % n")]


@pytest.mark.parametrize(
    "name, edits",
    [
        ("ring_all_reduce", RING_OF_PARLAB),
        ("ring_all_reduce", TO_THE_LEFT),
        ("ring_all_gather", [("rank - step", "rank + step"), ("rank + 1", "rank - 1")]),
    ],
    ids=["rank r ends with chunk r", "to the left", "all-gather to the left"],
)
def test_every_convention_of_a_ring_is_right(name, edits):
    function = buggy(name, edits)
    assert grade(EXERCISES[name], function, run=run_here).passed
    # They differ from the reference where chunks do, so this is no accident.
    arrays = [np.arange(5.0)] * 4 if name == "ring_all_reduce" else [*map(np.zeros, (1, 2, 3))]
    assert function(arrays)[1] != EXERCISES[name].solution(arrays)[1]


# The comparison.


@pytest.mark.parametrize(
    "got, expected",
    [
        (768.0, 768),
        (np.int64(768), 768),
        (np.array(768), 768),
        (1 / 3, 1 / 3 + 1e-12),
        ((1, 2), [1, 2]),
        (np.array([1, 2]), [1, 2]),
        ([[1.0, 2.0]], np.array([[1, 2]])),
        ([np.array([1.0])], [np.array([1])]),
        (np.float32(0.5), 0.5),
        (2, AnyOf((1, 2))),
        ({"b": 2, "a": (1,)}, {"a": [1], "b": 2}),
        (np.zeros(0), np.zeros(0)),
        (float("inf"), float("inf")),
    ],
    ids=str,
)
def test_harmless_differences_of_type_do_not_count(got, expected):
    assert difference(got, expected, 1e-9) is None


@pytest.mark.parametrize(
    "got, expected, path, what",
    [
        (767, 768, "", ""),
        (768 + 1e-9, 768, "", ""),
        (2**53, 2**53 + 1, "", ""),
        (float(2**53), 2**53 + 1, "", ""),
        (np.array([2.0**53]), np.array([2**53 + 1]), "[0]", ""),
        (np.array([[1, 2], [3, 5]]), np.array([[1, 2], [3, 4]]), "[1][1]", ""),
        (np.array([1.0, 1.001]), np.array([1.0, 1.0]), "[1]", ""),
        (np.zeros((2, 1)), np.zeros((1, 2)), "", "shape (2, 1) instead of (1, 2)"),
        ([1], [1, 2], "", "1 entries instead of 2"),
        ({1, 2}, [1, 2], "", "a list is expected"),
        ([[1], [2]], [[1], [3]], "[1][0]", ""),
        ({"a": 1}, {"b": 1}, "", "a dict with b is expected"),
        (np.array(["x"]), np.zeros(1), "", "an array of numbers is expected"),
        ([[1], [1, 2]], np.zeros((2, 2)), "", "an array is expected"),
        (np.array([np.nan]), np.array([1.0]), "[0]", ""),
        (np.array([1.0]), np.array([np.nan]), "[0]", ""),
        (float("inf"), 1.0, "", ""),
        (0.0, float("inf"), "", ""),
        (0, None, "", ""),
        (3, AnyOf((1, 2)), "", ""),
    ],
    ids=str,
)
def test_a_difference_is_found_at_its_place(got, expected, path, what):
    found = difference(got, expected, 1e-9)
    assert (found.path, found.what) == (path, what)


def test_nan_equals_nan_only_where_wrong_answers_are_compared():
    assert difference(float("nan"), float("nan"))
    assert difference(np.array([np.nan]), np.array([np.nan]))
    assert difference(float("nan"), float("nan"), nan_is_equal=True) is None
    assert difference(np.array([np.nan]), np.array([np.nan]), nan_is_equal=True) is None


# The door of the notebook.


def test_check_finds_the_exercise_by_name_prints_and_remembers(capsys):
    def bubble_of_ideal(stages, micro_batches):
        return (stages - 1) / micro_batches

    result = check(bubble_of_ideal)
    assert result.passed and result.args is None
    assert repr(result) == "<bubble_of_ideal: passed>"
    assert capsys.readouterr().out == "bubble_of_ideal: all 19 checks passed.\n"
    with open(".parlab_progress.json") as file:
        assert "bubble_of_ideal" in file.read()


def test_check_gives_the_failing_arguments_to_try_by_hand(capsys):
    def bubble_of_ideal(stages, micro_batches):
        return 0.0

    assert check(bubble_of_ideal).args == (2, 1)
    assert not os.path.exists(".parlab_progress.json")


@pytest.mark.parametrize(
    "function, error, message",
    [
        ("ring_all_reduce", TypeError, "must be the function itself, got 'ring_all_reduce'"),
        (functools.partial(print), TypeError, "must be the function itself"),
        (lambda: 0, ValueError, "got '<lambda>'"),
    ],
    ids=["text", "partial", "lambda"],
)
def test_what_is_no_named_function_is_refused(function, error, message):
    with pytest.raises(error, match=message):
        check(function)


def test_a_misspelt_name_is_answered_by_the_nearest():
    def ring_allreduce(arrays):
        return arrays

    with pytest.raises(ValueError, match="did you mean .*ring_all_reduce"):
        check(ring_allreduce)


def test_parlabs_own_functions_earn_nothing(capsys):
    import parlab as pl

    assert not check(pl.ring_all_reduce).passed
    assert not check(EXERCISES["zero_memory"].solution).passed
    assert capsys.readouterr().out.count("this is parlab's own") == 2


def test_numpy_exercises_need_no_torch():
    code = (
        "import sys; sys.modules |= dict.fromkeys(('torch', 'cloudpickle', 'matplotlib'))\n"
        "import parlab as pl\n"
        "def bubble_of_ideal(p, m): return (p - 1) / m\n"
        "print(pl.check(bubble_of_ideal).passed)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.splitlines()[-1] == "True"


def test_a_call_leaves_its_arguments_to_the_caller():
    args = ([np.zeros(2)],)

    def spoils(arrays):
        arrays[0] += 1
        arrays.append(1)
        return 0

    assert call(spoils, args).changed == 0
    assert len(args[0]) == 1 and not args[0][0].any()


@pytest.mark.parametrize(
    "name", ["ring_all_reduce", "ring_reduce_scatter", "hierarchical_all_reduce"]
)
def test_random_arrays_have_the_same_sum_in_any_order(name):
    for seed in range(300):
        arrays = EXERCISES[name].draw(np.random.default_rng(seed))[0]
        assert np.array_equal(sum(arrays), sum(arrays[::-1]))
