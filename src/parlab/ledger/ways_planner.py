"""Times of an iteration that the planner estimates for measured runs, for the ledger."""

from parlab import accuracy, hardware, models
from parlab.planner.search import search


def planned_seconds(table, run):
    """The estimate for one of `accuracy.runs(table)`, by its name."""
    (found,) = (each for each in accuracy.runs(table) if each.name == run)
    return found.estimate().seconds


def mean_fitted_error():
    """Mean size of the errors of all fitted runs."""
    measured = accuracy.all_runs(accuracy.FITTED_TABLES)
    return accuracy.summary([run.error() for run in measured])[0]


def held_out_rank_correlation():
    return accuracy.pooled_rank_correlation(accuracy.all_runs(accuracy.HELD_OUT_TABLES))


def layouts_considered():
    """Of Llama-3-70B on 64 nodes, 1024 sequences of 8192 tokens."""
    fleet = hardware.cluster("hgx-h100", 64)
    return search(models.model("llama-3-70b"), fleet, 8192, 1024).considered
