"""``make notebooks`` leaves a whole file on disk, whatever happens, and the same one every time."""

import os
import subprocess
import sys
import time

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook, new_output

from tools import notebooks
from tools.setup_cell import ROOT


def write(path, *sources):
    notebook = new_notebook(cells=[new_code_cell(source) for source in sources])
    nbformat.write(notebook, path)
    return path.read_bytes()


def test_a_run_stores_outputs_in_the_same_form_every_time(tmp_path):
    path = tmp_path / "chapter.ipynb"
    write(path, "print('one', flush=True); print('two')", "6 * 7")
    path.chmod(0o640)
    notebooks.refresh(path)
    first = path.read_bytes()
    cells = nbformat.read(path, as_version=4).cells
    assert [cell.execution_count for cell in cells] == [1, 2]
    assert [output.text for output in cells[0].outputs] == ["one\ntwo\n"]
    assert cells[1].outputs[0].data == {"text/plain": "42"}
    notebooks.refresh(path)
    assert path.read_bytes() == first
    assert os.name == "nt" or path.stat().st_mode & 0o777 == 0o640


def test_a_killed_run_leaves_the_old_file_whole(tmp_path):
    path = tmp_path / "chapter.ipynb"
    before = write(path, "1", "open('reached', 'w').close(); import time; time.sleep(60)")
    run = subprocess.Popen([sys.executable, "-m", "tools.notebooks", str(path)], cwd=ROOT)
    try:
        deadline = time.monotonic() + 60
        while not (tmp_path / "reached").exists():
            assert run.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        run.kill()
        run.wait()
    assert path.read_bytes() == before
    assert sorted(file.name for file in tmp_path.iterdir()) == ["chapter.ipynb", "reached"]


def test_a_failing_cell_fails_the_run_and_leaves_the_old_file_whole(tmp_path):
    path = tmp_path / "chapter.ipynb"
    before = write(path, "1", "1 / 0")
    run = subprocess.run(
        [sys.executable, "-m", "tools.notebooks", str(path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert run.returncode != 0
    assert "ZeroDivisionError" in run.stderr
    assert path.read_bytes() == before


def test_an_interrupted_write_leaves_the_old_file_and_no_other(tmp_path, monkeypatch):
    path = tmp_path / "chapter.ipynb"
    path.write_text("old")

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(notebooks.os, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        notebooks.replace_text(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_the_normal_form_drops_widgets_versions_and_timings_and_keeps_tags():
    widget = {notebooks.WIDGET_VIEW: {"model_id": "0"}, "text/html": "<svg/>"}
    cell = new_code_cell(
        "panel()",
        outputs=[new_output("display_data", widget)],
        metadata={"tags": ["hide-input"], "execution": {"iopub.execute_input": "now"}},
    )
    notebook = new_notebook(
        cells=[cell],
        metadata={"widgets": {}, "language_info": {"name": "python", "version": "3.11.7"}},
    )
    notebooks.normalise(notebook)
    assert notebook.metadata == notebooks.METADATA
    assert notebook.cells[0].metadata == {"tags": ["hide-input"]}
    assert notebook.cells[0].outputs[0].data == {"text/html": "<svg/>"}
