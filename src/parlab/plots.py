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


def bytes_over_step(curves):
    """Bytes on one rank through a training step, as lines over its moments, in order.

    curves: {label: list of (moment, bytes)}, all with the same moments.
    """
    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    for (label, points), colour, marker in zip(curves.items(), COLOURS, MARKERS, strict=False):
        moments, sizes = zip(*points, strict=True)
        axes.plot(moments, sizes, f"{marker}-", color=colour, markersize=4, label=label)
    axes.set(ylim=(0, None), ylabel="bytes alive")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda size, _: format_bytes(size)))
    axes.tick_params(axis="x", labelrotation=45)
    plt.setp(axes.get_xticklabels(), ha="right", rotation_mode="anchor")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    return figure


ACTION_COLOURS = {"F": "#0072B2", "B": "#D55E00", "I": "#D55E00", "W": "#009E73"}


def timelines(by_label, until=None):
    """Pipeline timelines as Gantt charts below one another, on one axis of time.

    by_label: {label: Timeline}, in seconds. until: the end of the axis; None is the latest end.
    Forward passes are full lanes high, backward passes lower, so that print tells them apart too.
    """
    until = until or max(timeline.makespan for timeline in by_label.values())
    lanes = sum(timeline.schedule.p for timeline in by_label.values())
    figure, rows = plt.subplots(
        len(by_label),
        figsize=(7, 0.32 * lanes + 0.7 * len(by_label)),
        sharex=True,
        squeeze=False,
        layout="constrained",
    )
    for axes, (label, timeline) in zip(rows[:, 0], by_label.items(), strict=True):
        for rank, actions in enumerate(timeline.schedule.actions):
            spans = zip(actions, timeline.starts[rank], timeline.ends[rank], strict=True)
            for action, start, end in spans:
                height = 0.86 if action.kind == "F" else 0.6
                axes.broken_barh(
                    [(start, end - start)],
                    (rank - height / 2, height),
                    color=ACTION_COLOURS[action.kind],
                    edgecolor="white",
                    linewidth=0.5,
                )
        axes.set(title=label, yticks=range(timeline.schedule.p), xlim=(0, until), ylabel="rank")
        axes.invert_yaxis()
        axes.spines[["top", "right"]].set_visible(False)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda seconds, _: format_seconds(seconds)))
    return figure
