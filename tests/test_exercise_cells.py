"""The chapters hold the exercises, questions and prompts that the catalogue has, word for word."""

import copy
import re

import nbformat
import pytest

from parlab.exercises.catalogue import EXERCISES
from parlab.exercises.grade import grade, run_here
from parlab.exercises.question_bank import QUESTIONS
from tools import exercise_cells

CHAPTERS = exercise_cells.CHAPTERS
FENCED = re.compile(r"^```python\n(.*?)\n```$", re.DOTALL | re.MULTILINE)


def cells_of(chapter):
    return nbformat.read(exercise_cells.chapter_path(chapter), as_version=4).cells


def tagged(chapter, start):
    """{name: the cells with the tag start + name} of a chapter."""
    found = {}
    for cell in cells_of(chapter):
        for tag in cell.metadata.get("tags", []):
            if tag.startswith(start):
                found.setdefault(tag.removeprefix(start), []).append(cell)
    return found


def test_the_first_six_chapters_have_exercises_and_questions():
    for entries in (EXERCISES, QUESTIONS):
        assert {entry.chapter for entry in entries.values()} >= {1, 2, 3, 4, 5, 6}


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_the_generated_cells_of_a_chapter_are_as_the_catalogue_has_them(chapter):
    cells = cells_of(chapter)
    assert exercise_cells.refreshed(cells, chapter) == cells, "run: python -m tools.exercise_cells"


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_a_chapter_has_each_of_its_exercises_and_questions_once(chapter):
    for start, entries in (("exercise:", EXERCISES), ("question:", QUESTIONS)):
        here = [name for name, entry in entries.items() if entry.chapter == chapter]
        found = tagged(chapter, start)
        assert sorted(found) == sorted(here)
        assert all(len(cells) == 1 for cells in found.values())


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_an_untouched_stub_says_one_calm_line(chapter):
    for name, (cell,) in tagged(chapter, "exercise:").items():
        assert [output.output_type for output in cell.outputs] == ["stream"]
        assert cell.outputs[0].text == f"{name}: not written yet.\n"


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_a_question_s_cell_asks_it_in_full(chapter):
    for name, (cell,) in tagged(chapter, "question:").items():
        shown = squeezed(cell.outputs[0].text)
        assert shown.startswith(squeezed(name + QUESTIONS[name].text))
        assert all(squeezed(text) in shown for text in (QUESTIONS[name].choices or {}).values())


def squeezed(text):
    """Text without its spaces and breaks of lines, which may follow a hyphen too."""
    return "".join(text.split())


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_the_exercises_come_before_the_questions_and_these_before_the_end(chapter):
    text = "\n".join(cell.source for cell in cells_of(chapter) if cell.cell_type == "markdown")
    headings = re.findall(r"^## (.+)", text, re.MULTILINE)
    wanted = ["Your turn", "Check yourself", "Explain it in two minutes", "What this leaves out"]
    if not exercise_cells.exercise_names(chapter):
        wanted.remove("Your turn")
    if not exercise_cells.prompt_cells(chapter):
        wanted.remove("Explain it in two minutes")
    assert [heading for heading in headings if heading in wanted] == wanted


@pytest.mark.parametrize("chapter", [c for c in CHAPTERS if exercise_cells.exercise_names(c)])
def test_a_printed_solution_passes_with_the_imports_of_its_section_alone(chapter):
    (imports,) = tagged(chapter, "exercises")[""]
    solutions = "\n".join(
        FENCED.search(cell.source)[1]
        for cell in cells_of(chapter)
        if cell.source.startswith("<details>\n<summary>A solution")
    )
    namespace = {}
    exec(imports.source + "\n" + solutions, namespace)
    for name in exercise_cells.exercise_names(chapter):
        if not EXERCISES[name].n_ranks:
            assert grade(EXERCISES[name], namespace[name], run=run_here).passed, name


# The tool that writes the cells.


@pytest.fixture
def cells():
    return cells_of(6)


def test_a_cell_that_drifted_is_written_anew_and_the_others_keep_their_output(cells):
    drifted = copy.deepcopy(cells)
    stub = next(c for c in drifted if "exercise:pipeline_bubble" in c.metadata.get("tags", []))
    answer = next(c for c in drifted if c.source.startswith("<details>\n<summary>Answer to 6.2"))
    stub.source += "  # changed"
    answer.source = answer.source.replace("c)", "b)")
    repaired = exercise_cells.refreshed(drifted, 6)
    assert [cell.source for cell in repaired] == [cell.source for cell in cells]
    without_output = [
        new.source
        for new, old in zip(repaired, cells, strict=True)
        if new.get("outputs") == [] and old.outputs != []
    ]
    assert without_output == [
        c.source for c in cells if c.source.endswith("check(pipeline_bubble)")
    ]


def test_a_new_exercise_gets_its_three_cells_and_a_dropped_one_loses_them(cells):
    tags = [cell.metadata.get("tags", []) for cell in cells]
    place = tags.index(["exercise:map_3d_job"])
    fewer = cells[: place - 1] + cells[place + 2 :]
    repaired = exercise_cells.refreshed(fewer, 6)
    assert [cell.source for cell in repaired] == [cell.source for cell in cells]

    dropped = copy.deepcopy(cells[place - 1 : place + 2])
    dropped[1].metadata.tags = ["exercise:no_longer_there"]
    more = cells[: place - 1] + dropped + cells[place - 1 :]
    assert exercise_cells.refreshed(more, 6) == cells


def test_hand_written_cells_stay(cells):
    note = nbformat.v4.new_markdown_cell("A word between the sections.")
    place = next(i for i, c in enumerate(cells) if c.source.startswith("## Check yourself"))
    noted = [*cells[:place], note, *cells[place:]]
    assert exercise_cells.refreshed(noted, 6) == noted


def test_a_chapter_without_the_section_is_refused(cells):
    bare = [c for c in cells if "question:" not in str(c.metadata.get("tags", []))]
    with pytest.raises(ValueError, match="chapter 6 has no cell yet for its questions"):
        exercise_cells.refreshed(bare, 6)


def test_the_command_changes_only_what_drifted_and_says_so(tmp_path, monkeypatch, capsys):
    for chapter in CHAPTERS:
        path = exercise_cells.chapter_path(chapter)
        text = path.read_text(encoding="utf-8")
        if chapter == 6:
            text = text.replace("Answer to 6.2", "Answer to 62")
        (tmp_path / path.name).write_text(text, encoding="utf-8")
    whole = exercise_cells.chapter_path(6).read_text(encoding="utf-8")
    monkeypatch.setattr(exercise_cells, "NOTEBOOKS", tmp_path)
    exercise_cells.main()
    changed = exercise_cells.chapter_path(6)
    assert capsys.readouterr().out == f"changed {changed.name}: run make notebooks\n"
    assert changed.read_text(encoding="utf-8") == whole
    exercise_cells.main()
    assert capsys.readouterr().out == ""
