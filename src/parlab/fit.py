"""Fit the two-parameter model of a transfer, time = a + bytes / B, and show what it leaves over."""

from dataclasses import dataclass
from math import fsum

from parlab.units import require_choice, require_number


@dataclass(frozen=True)
class Fit:
    """The line time = latency_s + bytes / bandwidth_bytes_per_s through measured times.

    ``relative_errors`` holds (predicted - measured) / measured, one per measurement.
    """

    latency_s: float
    bandwidth_bytes_per_s: float
    weighting: str
    relative_errors: tuple

    @property
    def mean_relative_error(self):
        """The mean size of the relative errors: 0.15 means that predictions are 15% off."""
        return fsum(abs(error) for error in self.relative_errors) / len(self.relative_errors)

    @property
    def half_size_bytes(self):
        """The size whose transfer takes as long as the latency; below it, latency dominates."""
        return self.latency_s * self.bandwidth_bytes_per_s

    def predict(self, size_bytes):
        """Return the fitted time in seconds for a size in bytes (a number or an array)."""
        size_bytes = require_number("size_bytes", size_bytes, minimum=0)
        return self.latency_s + size_bytes / self.bandwidth_bytes_per_s


def fit_latency_bandwidth(sizes_bytes, seconds, weighting="relative"):
    """Fit time = a + bytes / B to measured times by weighted least squares.

    Minimises sum w (a + bytes / B - t)^2 with w = 1/t^2 ("relative", so that a small message
    counts as much as a large one) or w = 1 ("plain", so that the largest messages decide alone).

    sizes_bytes, seconds: one entry per measurement, sizes >= 0, times > 0. Repeats are fine.
    Returns a Fit. Its latency is the line's intercept, reported as it is: below zero it says that
    the small sizes are too few or too noisy to show a latency.

    Raises ValueError for fewer than two different sizes, a time that is not positive, lists of
    different lengths, or times that do not grow with the size.

    >>> fit = fit_latency_bandwidth([0, 1_000_000, 2_000_000], [5e-6, 25e-6, 45e-6])
    >>> round(fit.latency_s * 1e6, 6), round(fit.bandwidth_bytes_per_s / 1e9, 6)
    (5.0, 50.0)
    """
    weighting = require_choice("weighting", weighting, ("relative", "plain"))
    sizes = [require_number("sizes_bytes", size, minimum=0) for size in sizes_bytes]
    times = [require_number("seconds", t, minimum=0, exclusive=True) for t in seconds]
    if len(sizes) != len(times):
        raise ValueError(
            f"sizes_bytes and seconds must pair up, got {len(sizes)} sizes and {len(times)} times"
        )
    if len(set(sizes)) < 2:
        raise ValueError(
            f"sizes_bytes must hold at least two different sizes, got {len(set(sizes))}: "
            "one size cannot tell latency from bandwidth"
        )
    weights = [1.0 / (t * t) if weighting == "relative" else 1.0 for t in times]
    intercept, slope = _weighted_line(sizes, times, weights)
    if slope <= 0:
        raise ValueError(
            f"seconds must grow with sizes_bytes, got a slope of {slope:.3g} s per byte: no "
            "bandwidth explains larger messages that take less time; measure larger sizes or repeat"
        )
    errors = tuple((intercept + slope * s - t) / t for s, t in zip(sizes, times, strict=True))
    return Fit(intercept, 1.0 / slope, weighting, errors)


def _weighted_line(x, y, weights):
    """Return intercept and slope; centred first, since sizes span many orders of magnitude."""
    total = fsum(weights)
    mean_x = fsum(w * a for w, a in zip(weights, x, strict=True)) / total
    mean_y = fsum(w * b for w, b in zip(weights, y, strict=True)) / total
    spread = fsum(w * (a - mean_x) ** 2 for w, a in zip(weights, x, strict=True))
    together = fsum(w * (a - mean_x) * (b - mean_y) for w, a, b in zip(weights, x, y, strict=True))
    slope = together / spread
    return mean_y - slope * mean_x, slope
