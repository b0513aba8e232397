"""Times of an iteration that the planner estimates for measured runs, for the ledger."""

from parlab import accuracy


def planned_seconds(table, run):
    """The estimate for one of `accuracy.runs(table)`, by its name."""
    (found,) = (each for each in accuracy.runs(table) if each.name == run)
    return found.estimate().seconds
