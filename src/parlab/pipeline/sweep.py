"""The start and end of each action, in one pass over all of them."""

from parlab.pipeline.actions import short_name

_MISSING = -1  # no such output yet; rank r waits for it: -2 - r


def sweep(schedule, times, transfer):
    """Return starts and ends, both by rank; times[kind][stage] is in seconds.

    Each rank runs down its list until an input is missing, and goes on from there once another
    rank has made it, so that the work is the same for every order.
    """
    plans = _plans(schedule, times, transfer)
    starts, ends = ([[] for _ in plans] for _ in range(2))
    awake = list(range(len(plans)))
    runs = [
        _run(
            rank, schedule.actions[rank], plan, awake.append, starts[rank].append, ends[rank].append
        )
        for rank, plan in enumerate(plans)
    ]
    while awake:
        next(runs[awake.pop()], None)
    done = [len(row) for row in ends]
    if done != [len(row) for row in schedule.actions]:
        raise ValueError(_deadlock(schedule, done))
    for rank in range(len(plans)):  # one by one, or the largest would be in memory twice
        starts[rank], ends[rank] = tuple(starts[rank]), tuple(ends[rank])
    return tuple(starts), tuple(ends)


def _run(rank, row, plan, wake, start_at, end_at):
    free = 0
    for kind, i, chunk in row:
        inputs, outputs, seconds, travel = plan[kind][chunk]
        start = inputs[i]
        if start < 0:
            inputs[i] = -2 - rank  # an input of its own that comes later will never wake it
            yield
            start = inputs[i]
        start += travel
        if start < free:
            start = free
        free = start + seconds
        start_at(start)
        end_at(free)
        waiting, outputs[i] = outputs[i], free
        if waiting < _MISSING:
            wake(-2 - waiting)


def _plans(schedule, times, transfer):
    """For each rank and kind, by chunk: where inputs come from, outputs go, seconds, travel."""
    last = len(schedule.ranks) - 1
    at_once, unused = [0] * schedule.m, [0] * schedule.m
    forward, backward = ([[_MISSING] * schedule.m for _ in schedule.ranks] for _ in range(2))

    def step(kind, stage, source):
        if kind == "W":
            inputs = backward[stage]
        elif 0 <= source <= last:
            inputs = (forward if kind == "F" else backward)[source]
        else:
            inputs = at_once if kind == "F" else forward[stage]
        outputs = {"F": forward[stage], "W": unused}.get(kind, backward[stage])
        near = not 0 <= source <= last or schedule.ranks[source] == schedule.ranks[stage]
        return inputs, outputs, times[kind][stage], 0 if near else transfer

    sources = {"F": -1, "B": 1, "I": 1, "W": 0}
    return [
        {kind: [step(kind, s, s + by) for s in stages] for kind, by in sources.items()}
        for stages in schedule.stages
    ]


def _deadlock(schedule, positions):
    """Follow the waiting ranks, each to the one it waits for, until one comes up again."""
    waits, rank = {}, next(r for r, row in enumerate(schedule.actions) if positions[r] < len(row))
    while rank not in waits:
        kind, i, chunk = schedule.actions[rank][positions[rank]]
        stage = schedule.stage(rank, chunk)
        if kind == "W":
            needs, source = "I", stage
        elif kind == "F":
            needs, source = "F", stage - 1
        elif stage < schedule.p * schedule.v - 1:
            needs, source = "BI", stage + 1
        else:
            needs, source = "F", stage
        other = schedule.ranks[source]
        there = schedule.stages[other].index(source)
        needed = next(a for a in schedule.actions[other] if a[0] in needs and a[1:] == (i, there))
        waits[rank] = (
            f"rank {rank} waits at position {positions[rank]} with "
            f"{short_name((kind, i, chunk), schedule.v)} for "
            f"{short_name(needed, schedule.v)} of "
            + (f"rank {other}" if other != rank else "its own, which comes later in its list")
        )
        rank = other
    chain = list(waits.values())
    if len(chain) > 6:
        chain[5:] = [f"and so on, {len(chain)} ranks in all"]
    return "the schedule is a deadlock: " + "; ".join(chain)
