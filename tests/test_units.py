"""Printed figures are right at every boundary, and the shared checks let no bad value through."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from parlab import units


@pytest.mark.parametrize(
    ("n_bytes", "text"),
    [
        (0, "0 B"),
        (-0.0, "0 B"),
        (0.5, "0.5 B"),
        (1, "1 B"),
        (512, "512 B"),
        (999, "999 B"),
        (999.4, "999 B"),
        (999.6, "1 kB"),
        (1000, "1 kB"),
        (1536, "1.54 kB"),
        (999_499, "999 kB"),
        (999_600, "1 MB"),
        (33_554_432, "33.6 MB"),
        (14e9, "14 GB"),
        (24.5e9, "24.5 GB"),
        (999.6e9, "1 TB"),
        (1.12e12, "1.12 TB"),
        (1e18, "1000 PB"),
        (-2500, "-2.5 kB"),
    ],
)
def test_bytes_are_written_in_decimal_units(n_bytes, text):
    assert units.format_bytes(n_bytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (5e-13, "0.0005 ns"),
        (1e-9, "1 ns"),
        (999.6e-9, "1 µs"),
        (5e-6, "5 µs"),
        (43.83e-6, "43.8 µs"),
        (999.6e-6, "1 ms"),
        (0.0544, "54.4 ms"),
        (0.49, "490 ms"),
        (0.9994, "999 ms"),
        (0.9996, "1 s"),
        (94.42, "94.4 s"),
        (1234, "1230 s"),
    ],
)
def test_seconds_are_written_with_the_nearest_prefix(seconds, text):
    assert units.format_seconds(seconds) == text


@pytest.mark.parametrize(
    ("rate", "text"),
    [(450e9, "450 GB/s"), (15.75e9, "15.8 GB/s"), (3350e9, "3.35 TB/s"), (0, "0 B/s")],
)
def test_rates_are_bytes_per_second(rate, text):
    assert units.format_rate(rate) == text


@given(st.floats(min_value=1e-2, max_value=1e18))
def test_a_written_size_reads_back_within_half_a_percent(n_bytes):
    number, unit = units.format_bytes(n_bytes).split()
    prefixes = {"B": 0, "kB": 3, "MB": 6, "GB": 9, "TB": 12, "PB": 15}
    assert float(number) * 10 ** prefixes[unit] == pytest.approx(n_bytes, rel=0.005)
    assert len(number.replace(".", "").strip("0")) <= 3


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf], ids=str)
def test_a_size_that_is_no_number_is_not_printed(bad):
    with pytest.raises(ValueError, match="n_bytes must be a finite number"):
        units.format_bytes(bad)


def test_constants_tell_gb_from_gib():
    assert (units.KB, units.MB, units.GB) == (1000, 1000**2, 1000**3)
    assert (units.KIB, units.MIB, units.GIB) == (1024, 1024**2, 1024**3)


@pytest.mark.parametrize(
    "value",
    [8, np.int8(8), np.int64(8), np.uint16(8), np.array(8)],
    ids=["int", "int8", "int64", "uint16", "0-d array"],
)
def test_whole_numbers_of_any_kind_become_python_ints(value):
    checked = units.require_int("n_ranks", value, minimum=8, maximum=8)
    assert checked == 8 and type(checked) is int


@pytest.mark.parametrize(
    "value",
    [True, np.True_, 8.0, np.float64(8), "8", None, [8], np.array([8])],
    ids=["bool", "numpy bool", "float", "numpy float", "text", "None", "list", "1-d array"],
)
def test_anything_else_is_not_a_whole_number(value):
    with pytest.raises(TypeError, match=r"n_ranks must be an int of at least 1, got .*: why not"):
        units.require_int("n_ranks", value, minimum=1, why="why not")


@pytest.mark.parametrize(
    ("value", "bounds", "message"),
    [
        (0, {"minimum": 1}, "n must be an int of at least 1, got 0"),
        (9, {"maximum": 8}, "n must be an int of at most 8, got 9"),
        (9, {"minimum": 1, "maximum": 8}, "n must be an int from 1 to 8, got 9"),
        (10**5000, {"maximum": 8}, "n must be an int of at most 8, got an int of 16610 bits"),
    ],
    ids=["below", "above", "outside", "absurd"],
)
def test_an_int_outside_its_bounds_is_refused_with_the_bounds(value, bounds, message):
    with pytest.raises(ValueError) as error:
        units.require_int("n", value, **bounds)
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("value", "kind"),
    [(3, int), (0.5, float), (np.int32(3), int), (np.float32(0.5), float), (np.array(2.5), float)],
    ids=["int", "float", "numpy int32", "numpy float32", "0-d array"],
)
def test_real_numbers_become_python_numbers(value, kind):
    checked = units.require_number("x", value, minimum=0)
    assert checked == value and type(checked) is kind


def test_an_array_of_small_ints_no_longer_wraps_around():
    sizes = np.array([2**30, 2**31 - 1], dtype=np.int32)
    checked = units.require_number("tensor_bytes", sizes, minimum=0)
    assert (checked * 14 == [14 * 2**30, 14 * (2**31 - 1)]).all()
    assert sizes.dtype == np.int32, "the input is left alone"


@pytest.mark.parametrize(
    "value",
    [math.nan, math.inf, -1, -1e-9, 10**400, 10**5000, np.float32("nan")],
    ids=["nan", "inf", "-1", "just below", "beyond float", "far beyond", "numpy nan"],
)
def test_a_number_that_cannot_be_computed_with_is_refused(value):
    with pytest.raises(ValueError, match="x must be a finite number of at least 0, got"):
        units.require_number("x", value, minimum=0)


@pytest.mark.parametrize(
    "array",
    [[1.0, math.nan], [1.0, math.inf], [1.0, -1.0]],
    ids=["nan", "inf", "negative"],
)
def test_one_bad_element_refuses_the_whole_array(array):
    with pytest.raises(ValueError, match="x must be a finite number of at least 0, got array"):
        units.require_number("x", np.array(array), minimum=0)


@pytest.mark.parametrize(
    "value",
    [True, "1", None, 1j, [1.0], np.array([True]), np.array(["1"])],
    ids=["bool", "text", "None", "complex", "list", "bool array", "text array"],
)
def test_what_is_not_a_real_number_is_a_type_error(value):
    with pytest.raises(TypeError, match="x must be a finite number, got"):
        units.require_number("x", value)


def test_an_exclusive_minimum_is_not_allowed_itself():
    assert units.require_number("x", 1e-300, minimum=0, exclusive=True) == 1e-300
    with pytest.raises(ValueError, match="x must be a finite number above 0, got 0: because"):
        units.require_number("x", 0, minimum=0, exclusive=True, why="because")


@pytest.mark.parametrize("name", ["ring", "RING", " Ring "])
def test_choices_ignore_case(name):
    assert units.require_choice("algorithm", name, ("tree", "ring")) == "ring"


def test_an_unknown_choice_lists_all_and_offers_the_nearest():
    with pytest.raises(ValueError, match="one of tree, ring, got 'rings'; did you mean ring?"):
        units.require_choice("algorithm", "rings", ("tree", "ring"))
    with pytest.raises(ValueError, match="got 'xyz'$"):
        units.require_choice("algorithm", "xyz", ("tree", "ring"))
    with pytest.raises(TypeError, match="algorithm must be text, one of tree, ring, got 3"):
        units.require_choice("algorithm", 3, ("tree", "ring"))
