"""How long the actions of each stage take, from what a reader gives."""

from parlab.units import require_number

MAX_SECONDS = 1e15


def stage_times(ranks, forward, backward, input_gradient, weight_gradient):
    """Return {kind: seconds by stage} for F, B, I and W; see `timeline.simulate`.

    ranks: the rank of every stage.
    """
    f = by_stage("forward", forward, len(ranks), ranks)
    b = by_stage("backward", backward, len(ranks), ranks)
    if input_gradient is None and weight_gradient is None:
        i = w = tuple(seconds / 2 for seconds in b)
    elif input_gradient is None or weight_gradient is None:
        raise ValueError("input_gradient and weight_gradient must be given both or neither")
    else:
        i = by_stage("input_gradient", input_gradient, len(ranks), ranks)
        w = by_stage("weight_gradient", weight_gradient, len(ranks), ranks)
        whole = tuple(x + y for x, y in zip(i, w, strict=True))
        left_out = set(b) == {1}
        if not left_out and any(abs(x - y) > 1e-9 * y for x, y in zip(b, whole, strict=True)):
            raise ValueError(
                "backward must be the sum of input_gradient and weight_gradient, or be left out, "
                f"got {backward!r:.60}"
            )
        b = whole
    working = {rank for stage, rank in enumerate(ranks) if f[stage] + b[stage]}
    if len(working) < len(set(ranks)):
        resting = min(set(ranks) - working)
        raise ValueError(f"forward and backward of rank {resting} must not both be 0")
    return {"F": f, "B": b, "I": i, "W": w}


def by_stage(name, value, stages, ranks=()):
    """Return one number per stage, from one number, one per stage or, given ranks, one per rank."""
    if not isinstance(value, (list, tuple)) and not getattr(value, "ndim", 0):
        return (require_seconds(name, value),) * stages
    values = tuple(require_seconds(f"{name}[{n}]", entry) for n, entry in enumerate(value))
    n_ranks = len(set(ranks))
    if len(values) == stages:
        return values
    if len(values) == n_ranks:
        return tuple(values[rank] for rank in ranks)
    per_rank = f"one per rank ({n_ranks}) or " if ranks else ""
    raise ValueError(
        f"{name} must be one number, {per_rank}one per stage ({stages}), got {len(values)}"
    )


def require_seconds(name, value):
    """Return one finite number from 0 to 10^15, so that no sum overflows."""
    number = require_number(name, value, minimum=0)
    if not isinstance(number, (int, float)):
        raise TypeError(f"{name} must be one number, got {len(number)} of them")
    if number > MAX_SECONDS:
        raise ValueError(f"{name} must be at most {MAX_SECONDS:.0e}, got {value!r:.40}")
    return number
