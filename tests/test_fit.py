"""The fit agrees with NumPy's, recovers exact lines, and says why when there is no line."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from parlab.fit import fit_latency_bandwidth
from parlab.published import all_reduce_times, published_table


def numpy_line(sizes, times, weights):
    """Intercept and slope by NumPy's polynomial fit, whose weights multiply the residuals."""
    slope, intercept = np.polyfit(sizes, times, 1, w=weights)
    return intercept, slope


@pytest.mark.parametrize("gpu", ["a100", "h200"])
@pytest.mark.parametrize("weighting", ["relative", "plain"])
def test_fit_agrees_with_numpy_polyfit(gpu, weighting):
    sizes, times = np.array(all_reduce_times(gpu)).T
    weights = 1 / times if weighting == "relative" else np.ones_like(times)
    intercept, slope = numpy_line(sizes, times, weights)
    fit = fit_latency_bandwidth(sizes, times, weighting)
    assert fit.latency_s == pytest.approx(intercept, rel=1e-9)
    assert 1 / fit.bandwidth_bytes_per_s == pytest.approx(slope, rel=1e-9)
    assert fit.weighting == weighting
    expected = (intercept + slope * sizes - times) / times
    assert np.allclose(fit.relative_errors, expected, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(
    "row",
    published_table("alpha-beta-fit-error").rows,
    ids=lambda r: f"{r['gpu']}-{r['weighting']}",
)
def test_fit_leaves_the_published_mean_error(row):
    fit = fit_latency_bandwidth(*zip(*all_reduce_times(row["gpu"]), strict=True), row["weighting"])
    assert round(100 * fit.mean_relative_error) == row["mean_error_percent"]


@pytest.mark.parametrize("weighting", ["relative", "plain"])
@given(
    latency=st.floats(1e-7, 1e-2),
    bandwidth=st.floats(1e8, 1e12),
    sizes=st.lists(st.integers(0, 10**10), min_size=2, max_size=12, unique=True),
)
def test_exact_line_is_recovered_whatever_the_weighting(weighting, latency, bandwidth, sizes):
    sizes = [*sizes, 10 * max(sizes) + 10**6]
    times = [latency + size / bandwidth for size in sizes]
    fit = fit_latency_bandwidth(sizes, times, weighting)
    # Rounding in the largest time limits how well the intercept can be seen.
    assert fit.bandwidth_bytes_per_s == pytest.approx(bandwidth, rel=1e-6)
    assert fit.latency_s == pytest.approx(latency, rel=1e-6, abs=1e-12 * max(times))


def test_small_messages_count_only_when_errors_are_relative():
    sizes, times = zip(*all_reduce_times("a100"), strict=True)
    relative = fit_latency_bandwidth(sizes, times, "relative").relative_errors[0]
    plain = fit_latency_bandwidth(sizes, times, "plain").relative_errors[0]
    assert abs(relative) < 0.3 < 2 < abs(plain)


def test_prediction_and_half_size_follow_the_line():
    fit = fit_latency_bandwidth([0, 1_000_000], [5e-6, 25e-6])  # 5 µs and 50 GB/s
    assert fit.half_size_bytes == pytest.approx(250_000)
    assert fit.predict(fit.half_size_bytes) == pytest.approx(2 * fit.latency_s)
    assert fit.predict(np.array([0, 500_000])) == pytest.approx([5e-6, 15e-6])
    assert fit.mean_relative_error == pytest.approx(0, abs=1e-12)


def test_intercept_below_zero_is_reported_as_it_is():
    assert fit_latency_bandwidth([1, 2, 3], [1, 3, 5], "plain").latency_s == pytest.approx(-1)


@pytest.mark.parametrize(
    ("sizes", "times", "message"),
    [
        ([], [], "at least two different sizes, got 0"),
        ([8], [1.0], "at least two different sizes, got 1"),
        ([8, 8, 8], [1.0, 2.0, 3.0], "at least two different sizes, got 1"),
        ([8, 16], [1.0], "got 2 sizes and 1 times"),
        ([8, 16], [1.0, 0.0], "seconds must be a finite number above 0, got 0.0"),
        ([8, 16], [1.0, float("nan")], "seconds must be a finite number above 0, got nan"),
        ([-8, 16], [1.0, 2.0], "sizes_bytes must be a finite number of at least 0, got -8"),
        ([8, 16], [2.0, 1.0], "seconds must grow with sizes_bytes"),
        ([8, 16], [1.0, 1.0], "seconds must grow with sizes_bytes"),
    ],
    ids=["empty", "one", "same", "lengths", "zero time", "nan", "negative size", "falling", "flat"],
)
def test_measurements_without_a_line_are_refused(sizes, times, message):
    with pytest.raises(ValueError, match=message):
        fit_latency_bandwidth(sizes, times)


def test_unknown_weighting_is_refused():
    with pytest.raises(ValueError, match="weighting must be one of relative, plain, got 'log'"):
        fit_latency_bandwidth([8, 16], [1.0, 2.0], "log")
