"""Groups of ranks on a cluster: which link they share, and what a collective takes on it.

Ranks are numbered as Megatron Core does: tensor parallelism is innermost, then context, then data,
and the pipeline outermost. So a group of g ranks that are `stride` apart has node / stride of them
in a node.
"""

from typing import NamedTuple


class Route(NamedTuple):
    """What a rank of a group sends through: bytes/s that it reaches, and seconds of a message."""

    bandwidth: float
    latency: float
    crosses: bool  # leaves the node


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


def neighbour_route(cluster, efficiencies, stride):
    """Return the Route from a rank to the one that is `stride` further: a pipeline's."""
    inside = stride < cluster.gpus_per_node or cluster.inter_node is None
    wire = cluster.intra_node if inside else cluster.inter_node
    share = efficiencies.nvlink if inside else efficiencies.network
    return Route(share * wire.bandwidth_bytes_per_s, wire.latency_s, not inside)


def gather_seconds(route, size, n_bytes):
    """Seconds of an all-gather or reduce-scatter of n_bytes in all, by a ring of `size` ranks."""
    return (size - 1) * (n_bytes / size / route.bandwidth + route.latency)
