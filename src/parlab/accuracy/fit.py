"""The fit of the eight efficiencies, errors of models that it never saw, and rank correlation."""

import math

import numpy as np

from parlab.planner.efficiencies import FITTED, PLAUSIBLE, Efficiencies

SCATTER = 0.03  # of a measured time, relative; weighs the runs against the plausible values


def fit(measured):
    """Return the Efficiencies that explain Runs best: Gauss-Newton on the logarithms of all eight.

    The sum of squares of log(estimated / measured) / SCATTER and of log(value / centre) / spread.
    """
    centre = np.log([known.centre for known in PLAUSIBLE])
    spread = np.array([known.spread for known in PLAUSIBLE])
    low = np.log([max(known.low, 1e-9) for known in PLAUSIBLE])
    high = np.log([known.high for known in PLAUSIBLE])
    x = centre.copy()
    for _ in range(30):
        at = _misfit(x, measured)
        slopes = np.array([(_misfit(x + step, measured) - at) / 1e-4 for step in 1e-4 * np.eye(8)])
        matrix = np.vstack([slopes.T, np.diag(1 / spread)])
        rest = np.concatenate([at, (x - centre) / spread])
        move = np.linalg.lstsq(matrix, -rest, rcond=None)[0]
        new = np.clip(x + np.clip(move, -0.5, 0.5), low, high)
        if np.abs(new - x).max() < 1e-7:
            break
        x = new
    return Efficiencies(*map(float, np.exp(x)))


def _misfit(x, measured):
    efficiencies = Efficiencies(*map(float, np.exp(x)))
    return np.array([math.log1p(run.error(efficiencies)) / SCATTER for run in measured])


def left_out_errors(measured):
    """Return {run name: error} where the fit saw no run of the same model."""
    errors = {}
    for group in dict.fromkeys(run.group for run in measured):
        efficiencies = fit([run for run in measured if run.group != group])
        for run in measured:
            if run.group == group:
                errors[run.table, run.name] = run.error(efficiencies)
    return errors


def rank_correlation(first, second):
    """Return Spearman's coefficient of two sequences; equal values share their mean rank.

    >>> rank_correlation([1, 2, 3, 4], [10, 20, 40, 30])
    0.8
    """
    ranks = [_ranks(np.asarray(values, float)) for values in (first, second)]
    return round(float(np.corrcoef(*ranks)[0, 1]), 12)


def _ranks(values):
    order = np.argsort(values, kind="stable")
    ranks = np.empty(len(values))
    ranks[order] = np.arange(len(values))
    for value in np.unique(values):
        ranks[values == value] = ranks[values == value].mean()
    return ranks


def summary(errors):
    """Return the mean and the largest of absolute errors, and the mean error."""
    sizes = [abs(error) for error in errors]
    return sum(sizes) / len(sizes), max(sizes), sum(errors) / len(errors)


def pooled_rank_correlation(measured, efficiencies=FITTED):
    """Return Spearman's coefficient of estimated and measured tokens/s per GPU of all Runs."""
    ours, theirs = [], []
    for run in measured:
        _, _, layout, sequence, batch = run.arguments
        ours.append(run.estimate(efficiencies).tokens_per_second_per_gpu)
        theirs.append(batch * sequence / layout.world / run.seconds)
    return rank_correlation(ours, theirs)
