"""Complete lists of actions: each rank runs every micro-batch through each of its chunks, once."""

from collections import Counter

from parlab.pipeline.actions import Action, parse_action, short_name
from parlab.units import require_int


def check_stages(stages):
    """Return stages[rank][chunk] as tuples; every stage from 0 on must have one place."""
    stages = tuple(tuple(require_int("stages", n, minimum=0) for n in row) for row in stages)
    chunks = {len(row) for row in stages}
    if len(chunks) != 1 or 0 in chunks:
        raise ValueError(
            f"stages must name equally many stages for every rank, at least one, got {stages!r:.80}"
        )
    placed = Counter(stage for row in stages for stage in row)
    for stage in range(len(stages) * len(stages[0])):
        if placed[stage] != 1:
            raise ValueError(
                f"stages must give each stage from 0 on one place, got {placed[stage]} for "
                f"stage {stage}"
            )
    return stages


def check_actions(rows, micro_batches, chunks):
    """Return the rows as tuples of Actions, or name the first that is missing or not wanted."""
    checked = []
    for rank, row in enumerate(rows):
        row = tuple(
            parse_action(entry, f"rank {rank}, position {n}") for n, entry in enumerate(row)
        )
        _check_row(row, rank, micro_batches, chunks)
        checked.append(row)
    return tuple(checked)


def _check_row(row, rank, m, v):
    position = {}
    for at, action in enumerate(row):
        name = short_name(action, v)
        if action.micro_batch >= m or action.chunk >= v:
            raise ValueError(
                f"rank {rank}, position {at}: {name} must be one of {m} micro-batches and "
                f"{v} chunks"
            )
        if action in position:
            raise ValueError(
                f"rank {rank} runs {name} twice, at positions {position[action]} and {at}"
            )
        position[action] = at
    for i in range(m):
        for c in range(v):
            forward, whole, *halves = (Action(kind, i, c) in position for kind in "FBIW")
            if forward and (whole, *halves) in ((True, False, False), (False, True, True)):
                continue
            ran = [short_name(Action(k, i, c), v) for k in "FBIW" if Action(k, i, c) in position]
            wanted = f"{short_name(Action('F', i, c), v)} and its backward, B or I and W"
            raise ValueError(f"rank {rank} must run {wanted}, got {' '.join(ran) or 'neither'}")
