"""How far estimates are from measured runs: the fit of the efficiencies, and runs it never saw.

`python -m parlab.accuracy` prints everything. Fitted are the eight `Efficiencies`, by least squares
of the logarithm of time, to the runs of three published tables; each is drawn to its plausible
value as strongly as its spread says. The runs of the other tables are held out. Memory has nothing
that is fitted.
"""

from parlab.accuracy.fit import (
    fit,
    left_out_errors,
    pooled_rank_correlation,
    rank_correlation,
    summary,
)
from parlab.accuracy.memory import peaks
from parlab.accuracy.runs import FITTED_TABLES, HELD_OUT_TABLES, Run, all_runs, runs

__all__ = [
    "FITTED_TABLES",
    "HELD_OUT_TABLES",
    "Run",
    "all_runs",
    "fit",
    "left_out_errors",
    "peaks",
    "pooled_rank_correlation",
    "rank_correlation",
    "runs",
    "summary",
]
