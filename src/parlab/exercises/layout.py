"""The exercise on layouts: which ranks of a 3D-parallel job form groups, and where they sit."""

from parlab.exercises.records import Case, Exercise, Misconception

AXES = ("tp", "dp", "pp")


def map_3d_job(tp, dp, pp, gpus_per_node=8):
    """Map a job with three axes onto a cluster: its groups, and the nodes that they span.

    Ranks count along the tensor-parallel axis first, then data-parallel, then pipeline, and fill
    one node after the other. The ranks of a group differ in one axis only.

    Returns (groups, nodes): two dicts with the keys "tp", "dp" and "pp". groups[axis] lists all
    groups along that axis, each a list of ranks; both in ascending order. nodes[axis] is the
    largest number of nodes that one of these groups touches.

    >>> groups, nodes = map_3d_job(tp=2, dp=2, pp=2, gpus_per_node=2)
    >>> groups["tp"], groups["dp"]
    ([[0, 1], [2, 3], [4, 5], [6, 7]], [[0, 2], [1, 3], [4, 6], [5, 7]])
    >>> groups["pp"], nodes
    ([[0, 4], [1, 5], [2, 6], [3, 7]], {'tp': 1, 'dp': 2, 'pp': 2})
    """
    strides = {"tp": 1, "dp": tp, "pp": tp * dp}  # given
    sizes = {"tp": tp, "dp": dp, "pp": pp}
    groups, nodes = {}, {}
    for axis, stride in strides.items():
        firsts = [r for r in range(tp * dp * pp) if r // stride % sizes[axis] == 0]
        groups[axis] = [[first + i * stride for i in range(sizes[axis])] for first in firsts]
        nodes[axis] = max(len({r // gpus_per_node for r in group}) for group in groups[axis])
    return groups, nodes


def _expect(tp, dp, pp, gpus_per_node=8, order=AXES):
    """Write down every rank's place on the axes, and gather ranks that share the other two."""
    size = {"tp": tp, "dp": dp, "pp": pp}
    places = [{}]
    for axis in reversed(order):  # the last axis changes most slowly
        places = [{**place, axis: i} for place in places for i in range(size[axis])]
    groups = {}
    for axis in AXES:
        members = {}
        for rank, place in enumerate(places):
            others = tuple(i for other, i in sorted(place.items()) if other != axis)
            members.setdefault(others, []).append(rank)
        groups[axis] = sorted(members.values())
    return groups, _nodes(groups, gpus_per_node)


def _nodes(groups, gpus_per_node):
    return {
        axis: max(len({rank // gpus_per_node for rank in ranks}) for ranks in lists)
        for axis, lists in groups.items()
    }


def _draw(rng):
    return *(int(size) for size in rng.integers(1, 5, 3)), int(rng.choice([2, 4, 8]))


# Known mistakes.


def _in_order(*order):
    return lambda tp, dp, pp, gpus_per_node=8: _expect(tp, dp, pp, gpus_per_node, order)


def _blocks(tp, dp, pp, gpus_per_node=8):
    n = tp * dp * pp
    groups = {
        axis: [list(range(first, first + size)) for first in range(0, n, size)]
        for axis, size in (("tp", tp), ("dp", dp), ("pp", pp))
    }
    return groups, _nodes(groups, gpus_per_node)


def _nodes_by_size(tp, dp, pp, gpus_per_node=8):
    right = _expect(tp, dp, pp, gpus_per_node)[0]
    return right, {a: -(-s // gpus_per_node) for a, s in (("tp", tp), ("dp", dp), ("pp", pp))}


def _nodes_of_all(tp, dp, pp, gpus_per_node=8):
    right = _expect(tp, dp, pp, gpus_per_node)[0]
    return right, dict.fromkeys(right, -(-tp * dp * pp // gpus_per_node))


_ON_8_NODES = {
    "tp": [list(range(first, first + 8)) for first in range(0, 64, 8)],
    "dp": [[first + i, first + i + 8] for first in range(0, 64, 16) for i in range(8)],
    "pp": [[i, i + 16, i + 32, i + 48] for i in range(16)],
}

MAP_3D_JOB = Exercise(
    chapter=6,
    solution=map_3d_job,
    expect=_expect,
    route="every rank's place written down, and ranks gathered that share two of three",
    draw=_draw,
    cases=(
        Case((1, 1, 1), (dict.fromkeys(AXES, [[0]]), dict.fromkeys(AXES, 1)), "one GPU"),
        Case(
            (8, 2, 4),
            (_ON_8_NODES, {"tp": 1, "dp": 2, "pp": 4}),
            "64 GPUs on 8 nodes, by hand",
        ),
    ),
    misconceptions=(
        Misconception(
            "tensor parallelism comes last, and spans nodes",
            (_in_order("pp", "dp", "tp"), _in_order("dp", "pp", "tp")),
            "The axis that changes fastest has neighbouring ranks, in one node. It must be tensor "
            "parallelism: its all-reduces are on the critical path, several in every layer.",
            "Which axis needs NVLink most?",
        ),
        Misconception(
            "pipeline before data parallelism",
            (_in_order("tp", "pp", "dp"),),
            "Some programs do order the axes like that. Here data parallelism comes second and "
            "the pipeline, which sends least, reaches farthest.",
            "How far apart are two ranks with the same place but for the data-parallel axis?",
        ),
        Misconception(
            "every group is a block of neighbours",
            (_blocks,),
            "Only along the fastest axis. Members of the others are a stride apart, since the "
            "ranks between them have other places on the faster axes.",
            "Which ranks hold the same weights as rank 0, for tp = 2 and dp = 2?",
        ),
        Misconception(
            "nodes counted by the group's size",
            (_nodes_by_size,),
            "Two ranks that are 8 apart are on two nodes, however small the group is.",
            "On which node is each member of the group?",
        ),
        Misconception(
            "the nodes of the whole job",
            (_nodes_of_all,),
            "The question is about one group; most of the job does not belong to it.",
            "On which node is each member of the group?",
        ),
    ),
    parts=("groups", "nodes"),
)

EXERCISES = (MAP_3D_JOB,)
