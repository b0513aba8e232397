"""Every error in text: of fitted runs, of models left out, of memory, and of held-out runs."""

from parlab.accuracy.fit import left_out_errors, pooled_rank_correlation, summary
from parlab.accuracy.memory import peaks
from parlab.accuracy.runs import FITTED_TABLES, HELD_OUT_TABLES, all_runs, runs
from parlab.planner.efficiencies import FITTED, PLAUSIBLE, Efficiencies


def report():
    """Return lines of text: the efficiencies, every fitted run, and each held-out table."""
    measured = all_runs(FITTED_TABLES)
    apart = left_out_errors(measured)
    lines = ["efficiency      value     plausible", ""]
    for name, value, known in zip(Efficiencies._fields, FITTED, PLAUSIBLE, strict=True):
        lines.append(f"{name:14s} {value:7.3g}     {known.low:g} to {known.high:g}")
    lines += ["", "fitted runs                                     s    error  left out", ""]
    for run in measured:
        alone = apart[run.table, run.name]
        lines.append(f"{run.name:42s} {run.seconds:7.3f}  {run.error():+6.1%}    {alone:+6.1%}")
    errors = [run.error() for run in measured]
    for words, values in (("in the fit", errors), ("each model left out", apart.values())):
        mean, worst, bias = summary(list(values))
        lines.append(f"{words:22s} mean {mean:.1%}, worst {worst:.1%}, bias {bias:+.1%}")
    lines += ["", "peak memory, nothing fitted                   GB    error", ""]
    found = list(peaks())
    for _, name, bytes_, ours in found:
        lines.append(f"{name:42s} {bytes_ / 1e9:7.2f}  {ours / bytes_ - 1:+6.1%}")
    for table in dict.fromkeys(row[0] for row in found):
        sizes = [row[3] / row[2] - 1 for row in found if row[0] == table]
        lines.append(f"{table:22s} mean {summary(sizes)[0]:.1%}, worst {summary(sizes)[1]:.1%}")
    lines += ["", "held out, in no fit      runs   mean  worst   bias  rank correlation", ""]
    for table in HELD_OUT_TABLES:
        rows = runs(table)
        mean, worst, bias = summary([run.error() for run in rows])
        same = pooled_rank_correlation(rows)
        lines.append(
            f"{table:22s} {len(rows):6d} {mean:6.1%} {worst:6.1%} {bias:+6.1%}  {same:.3f}"
        )
    held_out = all_runs(HELD_OUT_TABLES)
    mean, worst, bias = summary([run.error() for run in held_out])
    pooled = pooled_rank_correlation(held_out)
    lines.append(
        f"{'all':22s} {len(held_out):6d} {mean:6.1%} {worst:6.1%} {bias:+6.1%}  {pooled:.3f}"
    )
    return lines
