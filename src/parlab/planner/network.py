"""Groups of ranks on a cluster: which link they share, and what a collective takes on it.

Ranks are numbered as Megatron Core does: tensor parallelism is innermost, then context, then data,
and the pipeline outermost. So a group of g ranks that are `stride` apart has node / stride of them
in a node.
"""

from functools import lru_cache
from typing import NamedTuple


class Route(NamedTuple):
    """What a rank of a group sends through: bytes/s that it reaches, and seconds of a message."""

    bandwidth: float
    latency: float
    crosses: bool  # leaves the node


@lru_cache(maxsize=1024)
def route(cluster, efficiencies, size, stride):
    """Return the Route of the groups of `size` ranks that lie `stride` apart.

    A ring that crosses nodes uses the network cards of all its ranks in a node, so its bandwidth
    is the least of NVLink's and theirs together.
    """
    node, inside = cluster.gpus_per_node, cluster.intra_node
    bandwidth = efficiencies.nvlink * inside.bandwidth_bytes_per_s
    if size * stride <= node or cluster.inter_node is None:
        return Route(bandwidth, inside.latency_s, False)
    outside, ranks = cluster.inter_node, max(1, min(size, node // stride))
    network = efficiencies.network * outside.bandwidth_bytes_per_s * ranks
    return Route(min(bandwidth, network), outside.latency_s, True)


def hop_route(cluster, efficiencies, size, stride):
    """Return the Route of the slowest hop of a ring of point-to-point messages.

    Where it leaves the node, one rank sends through its own network card while the others wait.
    """
    leaves = size * stride > cluster.gpus_per_node
    return neighbour_route(cluster, efficiencies, cluster.gpus_per_node if leaves else 1)


def all_to_all_seconds(cluster, efficiencies, size, stride, n_bytes):
    """Seconds of an all-to-all in which a rank has n_bytes, of which 1/size stays with it.

    Messages to ranks of the same node and to others go over their own links at the same time.
    """
    near = neighbour_route(cluster, efficiencies, 1)
    if size * stride <= cluster.gpus_per_node or cluster.inter_node is None:
        return (size - 1) * (n_bytes / size / near.bandwidth + near.latency)
    far = neighbour_route(cluster, efficiencies, cluster.gpus_per_node)
    local = max(1, cluster.gpus_per_node // stride)
    inside = (local - 1) * (n_bytes / size / near.bandwidth + near.latency)
    return max(inside, (size - local) * (n_bytes / size / far.bandwidth + far.latency))


@lru_cache(maxsize=1024)
def neighbour_route(cluster, efficiencies, stride):
    """Return the Route from a rank to the one that is `stride` further: a pipeline's."""
    inside = stride < cluster.gpus_per_node or cluster.inter_node is None
    wire = cluster.intra_node if inside else cluster.inter_node
    share = efficiencies.nvlink if inside else efficiencies.network
    return Route(share * wire.bandwidth_bytes_per_s, wire.latency_s, not inside)


def gather_seconds(route, size, n_bytes):
    """Seconds of an all-gather or reduce-scatter of n_bytes in all, by a ring of `size` ranks."""
    return (size - 1) * (n_bytes / size / route.bandwidth + route.latency)
