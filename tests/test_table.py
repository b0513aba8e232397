"""Printed tables line up."""

import pytest

from parlab.table import print_table


def test_words_are_left_and_quantities_right_aligned(capsys):
    print_table(["name", "N", "time"], [("ring", 8, "1 ms"), ("tree of trees", 1024, "500 µs")])
    assert capsys.readouterr().out.splitlines() == [
        "name              N    time",
        "ring              8    1 ms",
        "tree of trees  1024  500 µs",
    ]


def test_a_table_without_rows_is_its_header(capsys):
    print_table(["name", "N"], [])
    assert capsys.readouterr().out == "name  N\n"


def test_a_row_of_another_length_is_refused():
    with pytest.raises(ValueError, match=r"must have 2 entries .* got \(1, 2, 3\)"):
        print_table(["a", "b"], [(1, 2, 3)])
