"""`pl.check` in a notebook of its own, in a folder that knows nothing of the repository."""

import nbformat
import pytest
from nbclient import NotebookClient

from parlab.exercises.source import solution_text, stub_text

CELLS = [
    # A stub, as a chapter shows it: prints, shows nothing else, writes no file.
    "import numpy as np\nimport parlab as pl\nimport os\n"
    + stub_text("ring_all_gather")
    + "\npl.check(ring_all_gather)",
    "print(os.listdir())",
    solution_text("ring_all_gather") + "\npl.check(ring_all_gather)",
    "print(os.listdir())",
    # Globals, helpers and classes of other cells, a closure, and nothing that pickle can import.
    "from typing import NamedTuple\n"
    "class Grid(NamedTuple):\n"
    "    idle: int\n"
    "    cells: int\n"
    "ONE = 1\n"
    "def grid(p, m):\n"
    "    return Grid(p * (p - ONE), p * (m + p - ONE))\n"
    "def make():\n"
    "    divide = lambda a, b: a / b\n"
    "    def pipeline_bubble(stages, micro_batches):\n"
    "        cells = grid(stages, micro_batches)\n"
    "        return divide(cells.idle, cells.cells)\n"
    "    return pipeline_bubble\n"
    "pl.check(make())",
    "def pipeline_bubble(p, m):\n    print('p =', p)\n    return (p - 1) / m\n"
    "pl.check(pipeline_bubble, seed=1)",
    "def pipeline_bubble(p, m):\n    rows = [0] * p\n    return rows[p + m]\n"
    "pl.check(pipeline_bubble, seed=1)",
    "def pipeline_bubble(p, m):\n    idle = 0\n    while idle < p:\n        pass\n"
    "result = pl.check(pipeline_bubble, seed=1)",
    "result.passed, result.args",
    "pl.check_answer('1.1', ...)",
    "pl.progress()",
    # On real processes, from a cell.
    solution_text("sharded_optimizer_step").replace("mean /= n", "print(mean)")
    + "\npl.check(sharded_optimizer_step, seed=1)",
]


@pytest.fixture(scope="module")
def outputs(tmp_path_factory):
    notebook = nbformat.v4.new_notebook(cells=[*map(nbformat.v4.new_code_cell, CELLS)])
    folder = tmp_path_factory.mktemp("notebook")
    NotebookClient(notebook, timeout=60, resources={"metadata": {"path": folder}}).execute()
    return [cell.outputs for cell in notebook.cells]


def text_of(outputs):
    """What a cell printed, if that is all it shows."""
    assert [output.output_type for output in outputs] == ["stream"], outputs
    return outputs[0].text


def test_the_stub_says_one_line_and_leaves_no_file(outputs):
    assert text_of(outputs[0]) == "ring_all_gather: not written yet.\n"
    assert text_of(outputs[1]) == "[]\n"


def test_the_solution_passes_and_is_remembered(outputs):
    assert text_of(outputs[2]) == "ring_all_gather: all 18 checks passed.\n"
    assert text_of(outputs[3]) == "['.parlab_progress.json']\n"
    progress = text_of(outputs[10])
    assert "x ring_all_gather" in progress and "x pipeline_bubble" in progress
    assert ". ring_all_reduce" in progress


def test_what_other_cells_define_goes_with_the_function(outputs):
    assert text_of(outputs[4]) == "pipeline_bubble: all 21 checks passed.\n"


def test_a_known_mistake_is_named_with_what_was_printed(outputs):
    assert text_of(outputs[5]) == (
        "pipeline_bubble: 1 of 21 checks passed.\n"
        "Smallest failing input: pipeline_bubble(2, 1)\n"
        "    the answer: got 1.0\n"
        "                expected 0.5\n"
        "It printed there (1 line):\n"
        "    | p = 2\n"
        "A known mistake: the other convention: idle over ideal time.\n"
        "    (p-1)/m divides the idle time by the time of the work alone. Papers use it too, "
        "but\n    it is no share of the run: for p > m + 1 it passes 1.\n"
        "    Hint: Divide by the time that the schedule really takes, from the first to the last\n"
        "    action.\n"
        "Random inputs: seed=1 repeats them.\n"
    )


def test_an_exception_shows_the_line_of_the_cell(outputs):
    text = text_of(outputs[6])
    assert "    IndexError: list index out of range\n" in text
    assert "    in pipeline_bubble, line 3: return rows[p + m]\n" in text


def test_an_endless_loop_shows_the_line_of_the_cell(outputs):
    assert "no answer after 5 s, so it was stopped\n    in pipeline_bubble, line " in text_of(
        outputs[7]
    )
    assert outputs[8][0].data["text/plain"] == "(False, (1, 1))"


def test_a_function_of_a_cell_runs_on_processes(outputs):
    text = text_of(outputs[11])
    assert "    weights: got [" in text and "A known mistake: summed, not averaged.\n" in text
    assert "It printed there (1 line):\n    | tensor([" in text


def test_a_question_is_asked(outputs):
    assert text_of(outputs[9]).startswith("1.1  A ring all-reduce of 1 GB on 8 GPUs")
