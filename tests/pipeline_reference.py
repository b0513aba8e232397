"""When the actions of a schedule run, by another route: longest paths in the graph of inputs."""

from graphlib import TopologicalSorter


def inputs(schedule):
    """{(rank, position): [what it waits for, with whether that comes from another rank]}."""
    place = {}  # (what, stage, micro-batch) -> (rank, position); "G" is a gradient, by B or by I
    for rank, row in enumerate(schedule.actions):
        for position, (kind, i, chunk) in enumerate(row):
            what = "G" if kind in "BI" else kind
            place[what, schedule.stages[rank][chunk], i] = rank, position
    last = max(stage for _, stage, _ in place)
    graph = {}
    for (what, stage, i), (rank, position) in place.items():
        needs = [(rank, position - 1)] if position else []
        if what == "F" and stage > 0:
            needs.append(place["F", stage - 1, i])
        if what == "G":
            needs.append(place["G", stage + 1, i] if stage < last else place["F", stage, i])
        if what == "W":
            needs.append(place["G", stage, i])
        graph[rank, position] = needs
    return graph


def ends(schedule, seconds, transfer=0):
    """{(rank, position): end}, or graphlib.CycleError; seconds(kind, stage) of an action."""
    graph, done = inputs(schedule), {}
    for node in TopologicalSorter(graph).static_order():
        rank, position = node
        kind, _, chunk = schedule.actions[rank][position]
        arrivals = [done[need] + transfer * (need[0] != rank) for need in graph[node]]
        done[node] = max(arrivals, default=0) + seconds(kind, schedule.stages[rank][chunk])
    return done
