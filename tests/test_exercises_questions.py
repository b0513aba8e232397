"""Check-yourself questions, prompts to explain, and what is remembered of a reader's progress."""

import json
import math

import numpy as np
import pytest

import parlab as pl
from parlab.exercises.catalogue import EXERCISES
from parlab.exercises.explain import PROMPTS
from parlab.exercises.progress import FILE, note_done
from parlab.exercises.question_bank import QUESTIONS
from parlab.exercises.questions import judge

NUMBERS = [name for name, question in QUESTIONS.items() if not question.choices]
CHOICES = [name for name, question in QUESTIONS.items() if question.choices]

# By hand, from the formulas and the published figures.
ANSWERS = {
    "1.1": 2 * 7 / 8,
    "1.2": 2 * 63 / 64,
    "1.3": "b",
    "1.4": "b",
    "1.5": 1.875,
    "2.1": "b",
    "2.2": 3.4,
    "2.3": "c",
    "2.4": 12,
    "2.5": "a",
    "3.1": "b",
    "3.2": "b",
    "3.3": 6,
    "3.4": 8,
    "3.5": "b",
    "4.1": 14 + 12.25,
    "4.2": 14,
    "4.3": 1.5,
    "4.4": 14 + 14,
    "4.5": 61.25,
    "5.1": 80,
    "5.2": 34 / 114,
    "5.3": "a",
    "5.4": 140,
    "5.5": 4.637,
    "6.1": 7 / 23,
    "6.2": "c",
    "6.3": 8,
    "6.4": 3 / 19,
    "6.5": "b",
    "6.6": 2,
    "7.1": "a",
    "7.2": 7 * 2 * 8192 * 8 * 128 * 2 / 1e6,
    "7.3": 1.5 * math.exp(-3),
    "7.4": 2 - 1 / 4,
    "7.5": 1979,  # 2 x 8/64 x 0.4 x 989.4e12 / 50e9 = 1978.8
    "7.6": 8 / 2,
    "8.1": (4 * 7.242780672 + 12 * (1.605636096 / 64 + 5.637144576 / 8)),
    "8.2": 8192 * 2 * 4096 * 2 * 7 / 8 / 1e6,
    "8.3": "c",
    "8.4": 8 / 2,
    "8.5": 320,
    "8.6": 2,
    "9.1": 512 / (8 * 4 * 2),
    "9.2": "b",
    "9.3": 2,  # 16 x 69e9 bytes on 16 cards are 69 GB each, on 8 they are 138 GB
    "9.4": "c",
    "9.5": "b",
    "10.1": 16 * 0.124439808,
    "10.2": 12 * 8192 * 50257 / 1e9,
    "10.3": 4 * 768 / (40 * 768 + 4 * 12 + 16),  # log-sum-exp: 4 bytes a head; norms: 16 a token
    "10.4": "b",
    "10.5": 6,  # 1.740 + 6 x 1.0006 = 7.74; 7 need 8.74
    "10.6": 10 * 0.494032768,
    "10.7": "b",
    "11.1": "b",
    "11.2": 4 * (50257 * 768 + 1024 * 768 + 2 * 768) / 1e6,
    "11.3": 4 + 8,
    "11.4": "c",
    "11.5": 4 * (2 * 85.054464 + 39.385344),
    "11.6": 2 * 4096**3 / 5e-3 / 65e12,
}


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_each_chapter_asks_at_least_five_questions():
    assert list(QUESTIONS) == list(ANSWERS)
    for chapter in range(1, 12):
        assert sum(question.chapter == chapter for question in QUESTIONS.values()) >= 5


@pytest.mark.parametrize("name", QUESTIONS)
def test_the_right_answer_is_the_one_found_by_hand(name):
    is_right, reply = judge(QUESTIONS[name], ANSWERS[name])
    assert is_right and reply.startswith("Yes")
    if name in NUMBERS:
        # As precisely as the answer by hand is written.
        assert QUESTIONS[name].answer() == pytest.approx(ANSWERS[name], rel=1e-4)


@pytest.mark.parametrize("name", NUMBERS)
def test_each_expected_wrong_number_gets_its_own_reply(name):
    question = QUESTIONS[name]
    for wrong, reply in question.replies:
        value = wrong() if callable(wrong) else wrong
        assert judge(question, value) == (False, f"Not yet. {reply}")


@pytest.mark.parametrize("name", CHOICES)
def test_each_wrong_choice_gets_its_own_reply(name):
    question = QUESTIONS[name]
    assert {letter for letter, _ in question.replies} == set(question.choices) - {question.answer}
    for letter, reply in question.replies:
        assert judge(question, f" {letter.upper()} ") == (False, f"Not yet. {reply}")
    assert judge(question, "z")[1].startswith("Answer with one of the letters a, b")


@pytest.mark.parametrize("answer", [1.75, "1.75", np.float64(1.75), np.array(1.75), 1.7501])
def test_an_answer_may_come_in_any_harmless_form(answer):
    assert judge(QUESTIONS["1.1"], answer)[0]


@pytest.mark.parametrize(
    "answer, said",
    [
        (1.75e9, "The right digits, in another unit: the answer is wanted in GB."),
        (1750, "The right digits, in another unit"),
        (1.2, "Not yet, and not one of the usual slips either."),
        (math.nan, "Not yet, and not one of the usual slips either."),
        ("much", "A number is asked for, in GB; got 'much'."),
        (True, "A number is asked for"),
        ([1.75], "A number is asked for"),
    ],
    ids=str,
)
def test_other_answers_get_a_reply_too(answer, said):
    is_right, reply = judge(QUESTIONS["1.1"], answer)
    assert not is_right and reply.startswith(said)


def test_a_question_is_printed_until_it_is_answered(capsys):
    pl.check_answer("6.3", ...)
    pl.check_answer("6.3", None)
    pl.check_answer("6.3")
    once = (
        "6.3  8 stages, 64 micro-batches: how many micro-batches does the first stage hold at\n"
        "     most, under 1F1B?\n"
        "     Your answer, a number, in place of the dots.\n"
    )
    assert capsys.readouterr().out == 3 * once
    pl.check_answer("6.3", 64)
    assert (
        capsys.readouterr().out == "6.3  Not yet. That is GPipe, which runs all forwards first.\n"
    )
    pl.check_answer("6.3", 8)
    said = "6.3  Yes: 8. As many as there are stages. GPipe holds 64.\n"
    assert capsys.readouterr().out == said


def test_an_unknown_question_offers_the_nearest():
    with pytest.raises(ValueError, match="name must be one of 1.1, .*got '1.9'"):
        pl.check_answer("1.9", 1)


@pytest.mark.parametrize("prompt", PROMPTS, ids=lambda prompt: prompt.text[:30])
def test_a_model_answer_takes_two_minutes_and_has_no_gap(prompt):
    text = prompt.answer()
    assert 80 < len(text.split()) < 260  # some 130 words a minute
    assert prompt.text.endswith(("?", "."))
    assert "nan" not in text and "{" not in text


def test_the_model_answers_hold_the_numbers_found_by_hand():
    texts = "\n".join(prompt.answer() for prompt in PROMPTS)
    for number in (
        *("1.75 GB", "1.97 GB", "14 steps", "126 on 64", "3.4", "17 ms", "150 ms", "50 ms"),
        *("112, 38.5, 26.25, 14 GB", "1.5 times", "7/11, 64%", "18%", "[0, 16, 32, 48]", "[0, 8]"),
    ):
        assert number in texts


# Progress.


def test_progress_lists_everything_and_marks_what_is_done(capsys):
    pl.progress()
    before = capsys.readouterr().out.splitlines()
    assert before[0] == "Chapter 1: 0 of 9 exercises, 0 of 5 questions"
    chapters = {entry.chapter for entry in [*EXERCISES.values(), *QUESTIONS.values()]}
    assert len(before) == len(chapters) + len(EXERCISES) + len(QUESTIONS)
    note_done("exercises", "ring_all_reduce")
    pl.check_answer("1.1", 1.75)
    pl.check_answer("1.2", 1)
    capsys.readouterr()
    pl.progress()
    after = capsys.readouterr().out.splitlines()
    assert after[0] == "Chapter 1: 1 of 9 exercises, 1 of 5 questions"
    assert "    x ring_all_reduce" in after and "    x 1.1" in after and "    . 1.2" in after
    assert sum(line.startswith("    x") for line in after) == 2


def test_progress_is_a_small_file_beside_the_work(tmp_path):
    for _ in range(2):
        note_done("exercises", "ring_all_reduce")
    note_done("questions", "1.1")
    assert json.loads((tmp_path / FILE).read_text()) == {
        "exercises": ["ring_all_reduce"],
        "questions": ["1.1"],
    }
    assert [path.name for path in tmp_path.iterdir()] == [FILE]


@pytest.mark.parametrize("content", ["", "{", "[]", '{"exercises": 3}', "\x00\xff", "null"])
def test_a_spoilt_file_is_no_catastrophe(tmp_path, content, capsys):
    (tmp_path / FILE).write_bytes(content.encode("latin-1"))
    pl.progress()
    assert "cannot be read; the next pass replaces it" in capsys.readouterr().out
    note_done("exercises", "row_parallel")
    pl.progress()
    printed = capsys.readouterr().out
    assert "    x row_parallel" in printed and "cannot be read" not in printed


def test_unknown_names_of_another_version_are_kept_and_not_shown(tmp_path, capsys):
    (tmp_path / FILE).write_text('{"exercises": ["of_old"], "questions": []}')
    note_done("exercises", "row_parallel")
    assert "of_old" in (tmp_path / FILE).read_text()
    pl.progress()
    assert "of_old" not in capsys.readouterr().out


def test_a_folder_that_takes_no_file_stops_nothing(tmp_path):
    note_done("exercises", "row_parallel", folder=tmp_path / "missing")
    (tmp_path / FILE).mkdir()
    note_done("exercises", "row_parallel")
    pl.progress()
