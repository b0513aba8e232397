"""The sample sessions on the book's pages are run, and print what the page shows."""

import doctest
import os
import re
import shutil
import subprocess
import sys
import sysconfig

import pytest

from tools.setup_cell import ROOT

PAGES = ("exercises", "teaching")
BLOCK = re.compile(
    r"^```(pycon|console|\{code-block\} python)\n(.*?)^```$", re.DOTALL | re.MULTILINE
)
SECONDS = re.compile(r"in \d+\.\d+s")
# Where these are set, pytest prints other lines.
NOT_FOR_PYTEST = ("CI", "BUILD_NUMBER", "PYTEST_ADDOPTS", "FORCE_COLOR", "PY_COLORS")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A copy of what a reader of the page has, with nothing solved."""
    shutil.copytree(
        ROOT / "exercises",
        tmp_path / "exercises",
        ignore=shutil.ignore_patterns("student.py", ".*", "__pycache__"),
    )
    for name in ("pyproject.toml", "tests/nbval_sanitize.cfg"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    stubs = [sys.executable, "-m", "parlab.exercises", "exercises/student.py"]
    subprocess.run(stubs, cwd=tmp_path, check=True, capture_output=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("page", PAGES)
def test_no_line_of_a_session_needs_a_scroll_bar(page):
    text = (ROOT / "book" / f"{page}.md").read_text(encoding="utf-8")
    lines = "".join(block for _, block in BLOCK.findall(text)).splitlines()
    assert [line for line in lines if len(line) > 88] == []


@pytest.mark.parametrize("page", PAGES)
def test_a_session_prints_what_the_page_shows(page, folder):
    text = (ROOT / "book" / f"{page}.md").read_text(encoding="utf-8")
    blocks = BLOCK.findall(text)
    assert {language for language, _ in blocks} == {"pycon", "console", "{code-block} python"}
    files = [block for language, block in blocks if language.startswith("{")]
    for block in files:
        write_file(folder, *re.match(r":caption: (\S+)\n(.*)", block, re.DOTALL).groups())
    run_python("".join(block + "\n" for language, block in blocks if language == "pycon"), page)
    for language, block in blocks:
        if language == "console":
            run_console(block)


def write_file(folder, name, text):
    """Write a file of the page; what stands in student.py replaces the stubs of that name."""
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write("\n\n" + text)


def run_python(text, page):
    test = doctest.DocTestParser().get_doctest(text, {"__name__": "__main__"}, page, page, 0)
    printed = []
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    assert test.examples
    assert runner.run(test, out=printed.append).failed == 0, "".join(printed)


def run_console(text):
    """Run the lines that start with $, and compare what follows each; ... stands for any lines."""
    scripts = sysconfig.get_path("scripts")
    environment = {k: v for k, v in os.environ.items() if k not in NOT_FOR_PYTEST}
    environment |= {"COLUMNS": "80", "PATH": scripts + os.pathsep + os.environ["PATH"]}
    for session in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
        command, _, wanted = session.partition("\n")
        run = subprocess.run(command, shell=True, env=environment, capture_output=True, text=True)
        got, wanted = (SECONDS.sub("in SECONDS", t) for t in (run.stdout + run.stderr, wanted))
        same = doctest.OutputChecker().check_output(wanted, got, doctest.ELLIPSIS)
        assert same, f"$ {command}\nprinted\n{got}\nand the page has\n{wanted}"
