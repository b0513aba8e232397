"""The exercise of chapter 1 on all-reduce in three stages, and the bytes that leave each node."""

import numpy as np

from parlab.exercises.records import Case, Exercise, Misconception
from parlab.exercises.ring import ORDER_OF_SUMS, exact_floats, total


def hierarchical_all_reduce(arrays, ranks_per_node):
    """All-reduce in three stages: inside the nodes, across them, inside the nodes.

    Reduce-scatter inside each node; then a ring all-reduce of each shard among the ranks that hold
    it, one in each node; then all-gather inside each node.

    arrays: one flat array per rank, of one dtype; the number of ranks divides their size.
    ranks_per_node: consecutive ranks that share a node.

    Returns (results, leaving): each rank's sum, and for each node the bytes that leave it.

    >>> results, leaving = hierarchical_all_reduce([np.ones(8)] * 4, ranks_per_node=2)
    >>> results[3].tolist() == [4.0] * 8, leaving
    (True, [64, 64])
    """
    n, local = len(arrays), ranks_per_node  # given
    nodes = n // local  # given
    shards = []
    for node in range(nodes):
        members = arrays[node * local : (node + 1) * local]
        shards.append(np.split(sum(members), local))
    totals = [sum(row[i] for row in shards) for i in range(local)]
    each_rank = 2 * (nodes - 1) * totals[0].nbytes // nodes
    return [np.concatenate(totals) for _ in range(n)], [local * each_rank] * nodes


def _expect_hierarchical(arrays, ranks_per_node):
    # Of M nodes each sends every element M - 1 times out of M as a partial sum, and again complete.
    nodes, elements = len(arrays) // ranks_per_node, arrays[0].size
    messages = 2 * (nodes - 1) * (elements // nodes)
    return [total(arrays)] * len(arrays), [messages * arrays[0].itemsize] * nodes


def _draw_nodes(rng):
    nodes, local = (int(size) for size in rng.integers(2, 5, 2))
    size = nodes * local * int(rng.integers(1, 3))
    return [exact_floats(rng, size) for _ in range(nodes * local)], local


# Known mistakes.


def _leaving(formula):
    """Right sums; bytes per node from the right ones, S, nodes M and ranks per node L."""

    def compute(arrays, local):
        results, right = _expect_hierarchical(arrays, local)
        nodes = len(right)
        return results, [formula(right[0], arrays[0].nbytes, nodes, local)] * nodes

    return (compute,)


def _node_sums(arrays, local):
    first = [rank // local * local for rank in range(len(arrays))]
    leaving = _expect_hierarchical(arrays, local)[1]
    return [total(arrays[start : start + local]) for start in first], leaving


HIERARCHICAL = Exercise(
    chapter=1,
    solution=hierarchical_all_reduce,
    expect=_expect_hierarchical,
    route="NumPy's sum; messages between nodes counted per element",
    draw=_draw_nodes,
    cases=(
        Case(
            ([np.ones(16, dtype=np.int8)] * 16, 8),
            ([np.full(16, 16, dtype=np.int8)] * 16, [16] * 2),
            "2 nodes of 8: S leaves each node (nccl-tests 196)",
        ),
        Case(
            ([np.ones(32, dtype=np.int8)] * 32, 8),
            ([np.full(32, 32, dtype=np.int8)] * 32, [48] * 4),
            "4 nodes of 8: 1.5 S leaves each node (nccl-tests 196)",
        ),
    ),
    misconceptions=(
        Misconception(
            "bytes of one card, not of the node",
            _leaving(lambda right, size, nodes, local: right / local),
            "Each of the L cards of a node sends its own shard; the node's bytes are the sum.",
            "Which ranks take part in the exchange between nodes?",
        ),
        Misconception(
            "the flat ring's bytes",
            _leaving(lambda right, size, nodes, local: 2 * size - 2 * size / nodes / local),
            "A flat ring over all N ranks carries 2 (N-1)/N S over each node's border. In three "
            "stages only partial sums of whole nodes cross it: 2 (M-1)/M S for M nodes.",
            "The ring between nodes has as many members as there are nodes.",
        ),
        Misconception(
            "every card sends its whole array to the other nodes",
            _leaving(lambda right, size, nodes, local: right * local),
            "After the reduce-scatter a card holds S/L bytes, and only these go out.",
            "How large is one rank's shard after the first stage?",
        ),
        Misconception(
            "the nodes never meet",
            (_node_sums,),
            "Inside its node a rank sees the sum of the node only.",
            "The second stage adds up the same shard from all nodes.",
        ),
    ),
    parts=("results", "leaving"),
    tolerance=1e-9,
    why_tolerance=ORDER_OF_SUMS,
)

EXERCISES = (HIERARCHICAL,)
