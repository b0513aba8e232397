"""What every notebook of the repository must be, beside running through."""

import re

import nbformat
import pytest
import yaml

from tools.book import toc_documents
from tools.colab import RUNTIME
from tools.notebooks import as_text, normalise
from tools.setup_cell import ROOT, repository_url, setup_cell

PATHS = sorted((ROOT / "notebooks").glob("*.ipynb"))
MOST_LINES = 15
WIDEST_LINE = 88  # what a page of the book shows without a scroll bar
# Files of the machine on which a chapter was last run, and what an author meant to come back to.
LEFTOVERS = re.compile(
    r"(?<![\w.:/])/(?:home|root|Users|tmp)/\S*|[A-Z]:\\+Users"
    r"|\b(?:TODO|FIXME|XXX)\b|(?i:lorem ipsum)"
)
pytestmark = pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)


def code_cells(path):
    cells = nbformat.read(path, as_version=4).cells
    return [cell for cell in cells if cell.cell_type == "code"]


def test_every_code_cell_was_executed_in_order(path):
    # nbval compares nothing in a cell that was never run, and passes.
    counts = [cell.execution_count for cell in code_cells(path)]
    assert counts == list(range(1, len(counts) + 1))


def test_no_code_cell_is_empty(path):
    assert all(cell.source.strip() for cell in code_cells(path))


def test_a_cell_has_at_most_fifteen_lines(path):
    lengths = [len(cell.source.splitlines()) for cell in code_cells(path)]
    assert max(lengths) <= MOST_LINES


def test_code_and_printed_lines_fit_the_page(path):
    texts = [cell.source for cell in code_cells(path)[1:]]
    texts += [o.text for cell in code_cells(path) for o in cell.outputs if "text" in o]
    lines = "\n".join(texts).splitlines()
    assert [line for line in lines if len(line) > WIDEST_LINE] == []


def test_the_first_code_cell_is_the_set_up_cell(path):
    first = code_cells(path)[0]
    assert first.source == setup_cell(repository_url())
    assert first.outputs == []


def test_a_notebook_is_stored_in_normal_form(path):
    notebook = nbformat.read(path, as_version=4)
    normalise(notebook)
    assert path.read_text(encoding="utf-8") == as_text(notebook), "run: make notebooks"


def test_no_cell_failed_unless_it_says_so(path):
    for cell in code_cells(path):
        if any(output.output_type == "error" for output in cell.outputs):
            assert "NBVAL_RAISES_EXCEPTION" in cell.source


def test_nothing_is_left_of_the_machine_or_of_a_draft(path):
    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            output.get("data", {}).pop("image/png", None)  # any letters may meet in base64
    text = nbformat.writes(notebook)
    assert LEFTOVERS.findall(text) == []
    assert str(ROOT) not in text


def test_the_first_lines_say_which_runtime_of_colab_it_needs(path):
    first = nbformat.read(path, as_version=4).cells[0]
    assert first.cell_type == "markdown"
    assert RUNTIME.search(first.source), "**You need** a CPU (or a GPU). On Colab, ... runtime ..."


def test_it_has_a_page_and_with_it_the_button_that_opens_it_on_colab(path):
    toc = yaml.safe_load((ROOT / "book" / "_toc.yml").read_text(encoding="utf-8"))
    assert f"notebooks/{path.stem}" in toc_documents(toc)
    config = yaml.safe_load((ROOT / "book" / "_config.yml").read_text(encoding="utf-8"))
    assert config["launch_buttons"]["colab_url"] == "https://colab.research.google.com"
    assert config["repository"]["path_to_book"] == ""  # the button's address starts at the root
