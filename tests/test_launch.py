"""`run_ranks` as a reader uses it: from a cell, a script, a thread, twice, and wrongly."""

import os
import socket
import subprocess
import sys
import textwrap
import threading

import pytest

from parlab.distributed import launch, start
from parlab.distributed.launch import RankError, run_ranks


def sum_of_ranks():
    """Every rank's own value, known without torch: 0 + 1 + ... + (n - 1)."""

    def add_up():
        import torch
        import torch.distributed as dist

        total = torch.tensor([dist.get_rank()])
        dist.all_reduce(total)
        return total.item()

    return add_up


@pytest.mark.parametrize(("n", "total"), [(1, 0), (2, 1), (4, 6)])
def test_n_joined_processes_return_their_values_in_rank_order(n, total):
    assert run_ranks(sum_of_ranks(), n) == [total] * n

    def which():
        import torch.distributed as dist

        return dist.get_rank(), os.getpid()

    ranks, pids = zip(*run_ranks(which, n), strict=True)
    assert ranks == tuple(range(n)) and len({*pids, os.getpid()}) == n + 1


@pytest.mark.skipif(sys.platform == "win32", reason="spawn is the only method there already")
def test_the_spawn_branch_that_windows_takes_gives_the_same():
    assert run_ranks(sum_of_ranks(), 2, start_method="spawn") == [1, 1]


def test_without_forkserver_spawn_is_chosen(monkeypatch):
    monkeypatch.setattr(start.multiprocessing, "get_all_start_methods", lambda: ["spawn"])
    assert start.context(None).get_start_method() == "spawn"


def test_arguments_environment_and_large_tensors_travel(monkeypatch):
    import torch

    run_ranks(os.getcwd, 1)
    monkeypatch.setenv("PARLAB_TEST_SETTING", "changed after the first launch")

    def double(tensor, by):
        return tensor * by, os.environ["PARLAB_TEST_SETTING"], torch.get_num_threads()

    for result, setting, threads in run_ranks(double, 2, args=(torch.arange(10**6), 2)):
        assert torch.equal(result, torch.arange(10**6) * 2)
        assert setting == "changed after the first launch" and threads == 1


def chatter():
    import torch.distributed as dist

    for i in range(3):
        print(f"rank {dist.get_rank()} line {i}")
        os.write(1, b"a library's notice\n")
    print("no newline", end="")


def test_the_first_ranks_lines_are_shown_in_order_and_no_others(capfd):
    run_ranks(chatter, 3)
    shown, errors = capfd.readouterr()
    assert shown == "rank 0 line 0\nrank 0 line 1\nrank 0 line 2\nno newline"
    assert errors == ""


def test_the_other_ranks_lines_follow_rank_by_rank_when_asked(capfd):
    run_ranks(chatter, 3, show_all=True)
    expected = "rank 0 line 0\nrank 0 line 1\nrank 0 line 2\nno newline"
    for r in (1, 2):
        expected += "".join(f"[rank {r}] rank {r} line {i}\n" for i in range(3))
        expected += f"[rank {r}] no newline"
    assert capfd.readouterr().out == expected


def test_lines_appear_while_the_ranks_still_run(monkeypatch):
    import io

    class Screen(io.StringIO):
        def write(self, text):
            if "first" in text:
                seen.set()
            return super().write(text)

    seen = threading.Event()
    gate = os.path.join(os.path.dirname(__file__), f".gate-{os.getpid()}")

    def speak_then_wait():
        import time

        print("first")
        while not os.path.exists(gate):
            time.sleep(0.02)

    monkeypatch.setattr(sys, "stdout", Screen())

    def open_gate():
        if seen.wait(50):
            open(gate, "w").close()

    opener = threading.Thread(target=open_gate)
    opener.start()
    try:
        run_ranks(speak_then_wait, 1, timeout=40)
    finally:
        opener.join()
        if os.path.exists(gate):
            os.remove(gate)


def test_it_runs_in_a_thread_and_from_several_at_once():
    results = {}

    def launch_from_here(i):
        results[i] = run_ranks(sum_of_ranks(), 2)

    threads = [threading.Thread(target=launch_from_here, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert results == {0: [1, 1], 1: [1, 1]}
    assert sys.modules["__main__"].__name__ == "__main__" and "__file__" in vars(
        sys.modules["__main__"]
    )


def test_an_occupied_port_and_another_jobs_settings_do_not_matter(monkeypatch):
    for name, value in {"MASTER_ADDR": "203.0.113.1", "MASTER_PORT": "29500", "RANK": "7"}.items():
        monkeypatch.setenv(name, value)
    with socket.socket() as occupier:
        occupier.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            occupier.bind(("", 29500))
            occupier.listen()
        except OSError:
            pass  # somebody else occupies it already, which serves as well
        assert run_ranks(sum_of_ranks(), 2) == [1, 1]


def test_leftovers_of_an_earlier_run_do_not_matter_and_none_are_left(monkeypatch, tmp_path):
    stale = tmp_path / "parlab-ranks-stale"
    stale.mkdir()
    (stale / "store").write_bytes(b"half a store")
    monkeypatch.setattr(launch.tempfile, "tempdir", str(tmp_path))
    assert run_ranks(sum_of_ranks(), 2) == [1, 1]
    assert [path.name for path in tmp_path.glob("parlab-*")] == ["parlab-ranks-stale"]


SCRIPT = """
    import torch.distributed as dist
    from parlab.distributed.launch import run_ranks

    print("the script starts")
    OFFSET = 10

    class Result:
        def __init__(self, value):
            self.value = value

    def helper():
        return Result(dist.get_rank() + OFFSET)

    def in_script():
        return helper()

    for start_method in {methods}:
        results = run_ranks(in_script, 2, start_method=start_method)
        print([type(result) is Result and result.value for result in results])
"""


def test_a_script_without_a_main_guard_launches_twice(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT.format(methods=(None, "spawn"))))
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    first, *others = done.stdout.splitlines()
    assert first == "the script starts" and set(others) == {"[10, 11]"}


def test_functions_of_notebook_cells_run_twice_and_their_errors_show_the_cell():
    import nbclient
    import nbformat

    cells = [
        "from parlab.distributed.launch import run_ranks",
        "def helper():\n    raise ValueError('said in a cell')",
        "def speak():\n    print('hello')\n    return 7\nrun_ranks(speak, 2)",
        "def fail():\n    helper()\nrun_ranks(fail, 2)",
        "run_ranks(speak, 2)",
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    nbclient.NotebookClient(notebook, allow_errors=True, timeout=90).execute()
    outputs = [cell.outputs for cell in notebook.cells]
    for first_or_second in (outputs[2], outputs[4]):
        assert [o.output_type for o in first_or_second] == ["stream", "execute_result"]
        assert first_or_second[0].text == "hello\n"
        assert first_or_second[1].data["text/plain"] == "[7, 7]"
    (error,) = outputs[3]
    assert error.ename == "RankError"
    summary, _, trace = error.evalue.partition("\n")
    assert summary in ("rank 0: ValueError: said in a cell", "rank 1: ValueError: said in a cell")
    assert "raise ValueError('said in a cell')" in trace


def not_sent():
    return None


@pytest.mark.parametrize(
    ("fn", "n", "options", "error", "message"),
    [
        (7, 2, {}, TypeError, "fn must be callable, got int"),
        (not_sent, 2.0, {}, TypeError, r"n must be an int from 1 to 64, got 2\.0"),
        (not_sent, True, {}, TypeError, "n must be an int"),
        (not_sent, 0, {}, ValueError, "n must be an int from 1 to 64, got 0"),
        (not_sent, 65, {}, ValueError, "got 65: each is a process of this machine"),
        (not_sent, 2, {"timeout": 0}, ValueError, "timeout must be a finite number above 0"),
        (not_sent, 2, {"timeout": float("inf")}, ValueError, "timeout must be a finite number"),
        (not_sent, 2, {"start_method": "fork"}, ValueError, "start_method must be one of"),
        (not_sent, 2, {"args": (threading.Lock(),)}, TypeError, "fn and args must be picklable"),
    ],
    ids=lambda value: getattr(value, "__name__", None) or str(value)[:30],
)
def test_a_wrong_parameter_is_named(fn, n, options, error, message):
    with pytest.raises(error, match=message):
        run_ranks(fn, n, **options)


def test_a_closure_that_cannot_travel_is_named_with_the_remedy():
    lock = threading.Lock()
    with pytest.raises(TypeError, match="cannot pickle '_thread.lock'.*create locks.*inside fn"):
        run_ranks(lambda: lock, 2)


def test_a_value_that_cannot_travel_is_named_with_its_rank():
    def generate():
        import torch.distributed as dist

        return (i for i in range(3)) if dist.get_rank() == 1 else None

    with pytest.raises(TypeError, match="value on rank 1 .*cannot pickle 'generator'.*return num"):
        run_ranks(generate, 2)


def test_a_value_that_cannot_be_rebuilt_is_named_with_its_rank():
    def return_a_trap():
        class Trap:
            def __reduce__(self):
                return int, ("not a number",)

        return Trap()

    with pytest.raises(TypeError, match="value of rank [01] arrived but cannot be rebuilt.*not a"):
        run_ranks(return_a_trap, 2)


def test_without_cloudpickle_module_functions_run_and_others_get_the_remedy(monkeypatch):
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    assert run_ranks(os.getcwd, 2) == [os.getcwd()] * 2

    def in_cell():
        return None

    in_cell.__module__ = "__main__"
    with pytest.raises(ImportError, match="'in_cell' is defined in a notebook.*pip install cloud"):
        run_ranks(in_cell, 2)


def test_without_torch_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setattr(launch.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match="pip install torch"):
        run_ranks(not_sent, 2)


def test_launching_does_not_load_torch_into_the_caller():
    code = "import sys, parlab.distributed.launch; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "False\n"


def test_a_failure_carries_its_rank():
    def leave():
        import torch.distributed as dist

        if dist.get_rank() == 1:
            sys.exit("enough")

    with pytest.raises(RankError, match="rank 1: SystemExit: enough") as caught:
        run_ranks(leave, 2)
    assert caught.value.rank == 1 and caught.value.exitcode is None
