"""Keep the chapters' exercises as the catalogue has them: ``python -m tools.exercise_cells``.

Exercises with their solutions, questions with their answers and prompts with theirs are written
into a chapter from `parlab.exercises`. Code cells among them carry a tag, by which they are found
again; the Markdown around them belongs to the cell beside it.
"""

import ast
from pathlib import Path

import nbformat

from parlab.exercises.catalogue import EXERCISES
from parlab.exercises.explain import PROMPTS
from parlab.exercises.question_bank import QUESTIONS
from parlab.exercises.source import notebook_cells, solution_text
from tools.notebooks import as_text, normalise, replace_text

NOTEBOOKS = Path(__file__).resolve().parent.parent / "notebooks"
CHAPTERS = sorted({entry.chapter for entry in [*EXERCISES.values(), *QUESTIONS.values(), *PROMPTS]})
IMPORTS_TAG, EXERCISE_TAG, QUESTION_TAG = "exercises", "exercise:", "question:"
PROMPTS_HEADING = "## Explain it in two minutes"


def chapter_path(chapter):
    """Return the notebook of a chapter, of which there must be one."""
    (path,) = NOTEBOOKS.glob(f"{chapter:02}_*.ipynb")
    return path


def exercise_names(chapter):
    """The exercises of a chapter, those on real processes last."""
    here = [exercise for exercise in EXERCISES.values() if exercise.chapter == chapter]
    return [exercise.name for exercise in sorted(here, key=lambda exercise: exercise.n_ranks > 0)]


def exercise_cells(chapter):
    """One cell with the imports, and for each exercise its text, its stub and its solution."""
    names = exercise_names(chapter)
    cells = [_code(_imports(names), IMPORTS_TAG)] if names else []
    for name in names:
        text, stub = notebook_cells(name)
        solution = f"```python\n{_without_docstring(solution_text(name))}\n```"
        cells += [_markdown(text), _code(stub, EXERCISE_TAG + name)]
        cells += [_markdown(_folded("A solution", solution))]
    return cells


def question_cells(chapter):
    """For each question of a chapter a cell that asks it, and its answer."""
    cells = []
    for name, question in QUESTIONS.items():
        if question.chapter == chapter:
            cells += [_code(f'pl.check_answer("{name}", ...)', QUESTION_TAG + name)]
            cells += [_markdown(_folded(f"Answer to {name}", _answer(question)))]
    return cells


def prompt_cells(chapter):
    """One cell with a chapter's prompts and their model answers, or none."""
    blocks = [PROMPTS_HEADING]
    for prompt in PROMPTS:
        if prompt.chapter == chapter:
            blocks += [f"**{prompt.text}**", _folded("What a good answer says", prompt.answer())]
    return [_markdown("\n\n".join(blocks))] if blocks[1:] else []


def refreshed(cells, chapter):
    """Return a chapter's cells with the generated ones as they are now; others stay as they are.

    A section is replaced where it stands. One that the chapter does not have yet is a ValueError.
    """
    known = {(cell.cell_type, cell.source, *_tags(cell)): cell for cell in cells}
    for start, end, wanted in _sections(cells, chapter):
        wanted = [known.get((c.cell_type, c.source, *_tags(c)), c) for c in wanted]
        cells = [*cells[:start], *wanted, *cells[end:]]
    return cells


def _sections(cells, chapter):
    """Start and end of each generated section, and what it should hold; the last one first."""
    is_exercise = _with_tag(IMPORTS_TAG, EXERCISE_TAG)
    is_question = _with_tag(QUESTION_TAG)
    found = []
    for title, is_its_own, wanted in (
        ("exercises", is_exercise, exercise_cells(chapter)),
        ("questions", is_question, question_cells(chapter)),
        ("prompts", lambda cell: cell.source.startswith(PROMPTS_HEADING), prompt_cells(chapter)),
    ):
        places = [place for place, cell in enumerate(cells) if is_its_own(cell)]
        if wanted and not places:
            raise ValueError(f"chapter {chapter} has no cell yet for its {title}")
        if places:
            answer_below = cells[places[-1]].cell_type == "code"
            found.append((places[0], places[-1] + 1 + answer_below, wanted))
    return sorted(found, key=lambda section: section[0], reverse=True)


def _with_tag(*starts):
    return lambda cell: any(tag.startswith(starts) for tag in _tags(cell))


def _tags(cell):
    return cell.metadata.get("tags", [])


def _code(source, tag):
    return nbformat.v4.new_code_cell(source, metadata={"tags": [tag]})


def _markdown(source):
    return nbformat.v4.new_markdown_cell(source)


def _folded(title, text):
    """HTML that Jupyter, Colab and the book all show as a line to open."""
    return f"<details>\n<summary>{title}</summary>\n\n{text}\n\n</details>"


def _imports(names):
    """What stubs and solutions use, so that a reader may begin with the exercises."""
    code = [ast.parse(solution_text(name)) for name in names]
    used = {node.id for tree in code for node in ast.walk(tree) if isinstance(node, ast.Name)}
    blocks = ["import math"] if "math" in used else []
    blocks += ["import numpy as np"] if "np" in used else []
    blocks += ["import parlab as pl" + "\nfrom parlab import gelu" * ("gelu" in used)]
    return "\n\n".join(blocks)


def _without_docstring(text):
    """The exercise's text stands above, so it need not be repeated."""
    docstring = ast.parse(text).body[0].body[0]
    lines = text.rstrip().splitlines()
    return "\n".join(lines[: docstring.lineno - 1] + lines[docstring.end_lineno :])


def _answer(question):
    if question.choices:
        return f"{question.answer}) {question.choices[question.answer]}. {question.why()}"
    return f"{question.answer():.4g} {question.unit}".rstrip() + f". {question.why()}"


def main():
    """Bring all chapters up to date; those that changed have cells to be run: make notebooks."""
    for chapter in CHAPTERS:
        path = chapter_path(chapter)
        notebook = nbformat.read(path, as_version=4)
        notebook.cells = refreshed(notebook.cells, chapter)
        normalise(notebook)
        if as_text(notebook) != path.read_text(encoding="utf-8"):
            replace_text(path, as_text(notebook))
            print(f"changed {path.name}: run make notebooks")


if __name__ == "__main__":
    main()
