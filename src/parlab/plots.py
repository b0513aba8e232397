"""Figures of measured data, drawn with matplotlib; a cell shows one with `plt.show()`."""

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.ticker import FuncFormatter

from parlab.units import format_bytes, format_rate, format_seconds

# Okabe and Ito's palette: told apart by readers with any kind of colour vision.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7")
MARKERS = "osD^"


def bandwidth_ladder(rungs):
    """Bars on a logarithmic axis, one for each `Rung` of `parlab.bandwidth_ladder`."""
    figure, axes = plt.subplots(figsize=(7, 0.5 * len(rungs) + 0.9), layout="constrained")
    rates = [rung.bandwidth_bytes_per_s for rung in rungs]
    bars = axes.barh([rung.name for rung in rungs], rates, color=COLOURS[0])
    axes.bar_label(bars, labels=[format_rate(rate) for rate in rates], padding=4)
    axes.invert_yaxis()
    axes.set(xscale="log", xlim=(min(rates) / 4, max(rates) * 6))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda rate, _: format_rate(rate)))
    axes.set_xlabel("bandwidth per GPU, one direction")
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def time_against_size(measured, fits):
    """Measured times and fitted lines on logarithmic axes.

    measured: {label: list of (size in bytes, seconds)}. fits: {label: Fit}, for the same labels.
    """
    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    for (label, points), colour, marker in zip(measured.items(), COLOURS, MARKERS, strict=False):
        sizes, seconds = zip(*points, strict=True)
        axes.plot(sizes, seconds, marker, color=colour, markersize=5, label=f"{label}, measured")
        line = np.geomspace(min(sizes), max(sizes), 200)
        axes.plot(line, fits[label].predict(line), color=colour, label=f"{label}, a + S/B")
    axes.set(xscale="log", yscale="log", xlabel="message size S", ylabel="time")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda size, _: format_bytes(size)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda time, _: format_seconds(time)))
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    return figure
