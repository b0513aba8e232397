"""Closed forms of idle time in a pipeline, each with what it assumes.

All stages take the same time, F forward and B = I + W backward, and messages none. Where stages
differ or messages take time, `timeline.simulate` has the answer.
"""

from parlab.pipeline.timeline import CONVENTIONS
from parlab.pipeline.times import stage_times
from parlab.units import require_choice, require_int

MAX_SIZE = 10**9
SCHEDULES = ("GPipe", "1F1B", "interleaved 1F1B", "ZB-H1", "ZB-H2", "ZB-V")


def pipeline_bubble(stages, micro_batches, chunks=1, *, of="total"):
    """Idle fraction of GPipe, 1F1B and, with chunks, interleaved 1F1B.

    With p stages, m micro-batches and v chunks, and e = (v - 1) max(p - m, 0): where m < p, each
    further chunk waits p - m steps for the first micro-batch to come round.

        of="total"   (p-1 + e) / (v m + p-1 + e)       idle over all rank-time, below 1
        of="ideal"   (p-1 + e) / (v m)                 idle over the time of the work; can pass 1
        of="span"    (p-1 + 2e) / (2 v m + p-1 + 2e)   between each rank's first and last action

    Narayanan et al. (arXiv 2104.04473), section 2.2, give (p-1) / (v m), of ideal, for m a multiple
    of p, where e = 0. It assumes equal stages and messages that take no time; F and B may differ.

    stages: p, ranks with v chunks each. micro_batches: m, any number from 1.

    Raises ValueError or TypeError for counts that are no ints from 1 on, and other words for `of`.

    >>> pipeline_bubble(4, 29) == 3 / 32, pipeline_bubble(8, 4) == 7 / 11
    (True, True)
    >>> [pipeline_bubble(4, 8, 2, of=of) for of in ("total", "ideal")] == [3 / 19, 3 / 16]
    True
    """
    p, m, v = _sizes(stages, micro_batches, chunks)
    of = require_choice("of", of, CONVENTIONS)
    waiting = (v - 1) * max(p - m, 0)
    idle, work = p - 1 + waiting, v * m
    if of == "total":
        return idle / (work + idle)
    if of == "ideal":
        return idle / work
    return (idle + waiting) / (2 * work + idle + waiting)


def pipeline_bubble_seconds(
    schedule,
    stages,
    micro_batches,
    forward=1.0,
    backward=1.0,
    *,
    chunks=1,
    input_gradient=None,
    weight_gradient=None,
    of="total",
):
    """Idle seconds of the rank that idles longest, for every schedule that has a formula.

    of="total": over the makespan, which is v m (F + I + W) more. of="span": between its own first
    and last action, as zero-bubble papers count (Qi et al., arXiv 2401.10241, table 1).

                              of="total"               of="span"            for
        GPipe, 1F1B           (p-1) (F+B)              the same             all m
        interleaved 1F1B      (p-1 + e) (F+B)          the same             all m
        ZB-H1                 (p-1) (F + max(I-W, 0))  (p-1) (F + I - W)    m >= p, W <= F
        ZB-H2                 (p-1) (F + max(I-2W, 0)) (p-1) (F + I - 2W)   m >= 2p-1, W <= F,
                                                                            2W <= F + I
        ZB-V                  (p-1) F                  0                    m >= 2p-1, F = I = W

    with e as in `pipeline_bubble`. With F = I = W, ZB-H2 and ZB-V reach 0 within the span. They
    still take (p-1) F more than the work of one rank, and H2 ends no sooner than H1.

    schedule: one of "GPipe", "1F1B", "interleaved 1F1B", "ZB-H1", "ZB-H2", "ZB-V".
    stages, micro_batches, chunks: p, m, v; ZB-V has 2 chunks, the others 1.
    forward, backward, input_gradient, weight_gradient: seconds of one stage, as in `simulate`.

    Raises ValueError where the formula does not hold: `simulate` has the answer there too.

    >>> halves = {"input_gradient": 1, "weight_gradient": 1}
    >>> [pipeline_bubble_seconds(name, 8, 16, 1, **halves) for name in ("1F1B", "ZB-H1")]
    [21, 7]
    """
    name = require_choice("schedule", schedule, SCHEDULES)
    of = require_choice("of", of, ("total", "span"))
    p, m, v = _sizes(stages, micro_batches, chunks)
    times = stage_times((0,), forward, backward, input_gradient, weight_gradient)
    f, i, w = (times[kind][0] for kind in "FIW")
    needs_chunks = {"interleaved 1F1B": v, "ZB-V": 2}.get(name, 1)
    if v != needs_chunks:
        raise ValueError(f"chunks must be {needs_chunks} for {name}, got {v}")
    if name in ("GPipe", "1F1B", "interleaved 1F1B"):
        return (p - 1 + (v - 1) * max(p - m, 0)) * (f + i + w)
    if name == "ZB-V":
        _require_formula(name, m >= 2 * p - 1 and f == i == w, "m >= 2 p - 1 and F = I = W")
        return (p - 1) * f if of == "total" else 0
    if name == "ZB-H1":
        _require_formula(name, m >= p and w <= f, "m >= p and W <= F")
        saved = i - w
    else:
        holds = m >= 2 * p - 1 and w <= f and 2 * w <= f + i
        _require_formula(name, holds, "m >= 2 p - 1, W <= F and 2 W <= F + I")
        saved = i - 2 * w
    return (p - 1) * (f + (max(saved, 0) if of == "total" else saved))


def _sizes(stages, micro_batches, chunks):
    p = require_int("stages", stages, minimum=1, maximum=MAX_SIZE)
    m = require_int("micro_batches", micro_batches, minimum=1, maximum=MAX_SIZE)
    return p, m, require_int("chunks", chunks, minimum=1, maximum=MAX_SIZE)


def _require_formula(name, holds, condition):
    if not holds:
        raise ValueError(
            f"the formula of {name} must have {condition}; simulate needs no condition"
        )
