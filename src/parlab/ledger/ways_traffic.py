"""Bytes that are sent, by formula and counted in schedules, and seconds, for the ledger."""

from parlab import hardware
from parlab.collectives import cost, schedules
from parlab.fit import fit_latency_bandwidth
from parlab.hardware import Link, cluster, link
from parlab.memory.traffic import zero_traffic, zero_traffic_bytes
from parlab.published import all_reduce_times
from parlab.tensor_traffic import (
    columns_only_mlp_traffic,
    compute_seconds,
    layer_flops,
    tensor_parallel_traffic,
)

# The tensor-parallel example: h = s = 4096, one sequence, 8 ranks.
_H100 = hardware.gpu("h100-sxm")
EXAMPLE = {"hidden": 4096, "sequence": 4096, "micro_batch": 1, "tp": 8}


def ring_bytes(n_ranks, tensor_bytes):
    return cost.all_reduce_cost(n_ranks, tensor_bytes, Link(0, 1)).bytes_per_rank


def ring_bytes_counted(n_ranks, tensor_bytes):
    return max(
        cost.traffic(schedules.ring_all_reduce_schedule(n_ranks), tensor_bytes / n_ranks).sent
    )


def ring_steps(n_ranks):
    return cost.all_reduce_cost(n_ranks, 1, Link(0, 1)).steps


def ring_steps_counted(n_ranks):
    return len(schedules.ring_all_reduce_schedule(n_ranks).steps)


def gathered_on_one_rank(n_ranks, tensor_bytes):
    """What rank 0 receives where it adds up alone."""
    return cost.traffic(schedules.naive_all_reduce_schedule(n_ranks), tensor_bytes).received[0]


def ring_seconds(n_ranks, tensor_bytes, wire):
    """On a named link, latency left out."""
    bandwidth = link(wire).bandwidth_bytes_per_s
    return cost.all_reduce_cost(n_ranks, tensor_bytes, Link(0, bandwidth)).seconds


def priced_seconds(n_ranks, tensor_bytes, wire):
    return cost.all_reduce_cost(n_ranks, tensor_bytes, link(wire)).seconds


def priced_seconds_counted(n_ranks, tensor_bytes, wire):
    """The schedule, step by step."""
    schedule = schedules.ring_all_reduce_schedule(n_ranks)
    return cost.price(schedule, tensor_bytes, link(wire)).seconds


def hierarchical_seconds(n_nodes, ranks_per_node, tensor_bytes):
    node = cluster("hgx-h100")
    return cost.hierarchical_all_reduce_cost(
        n_nodes, ranks_per_node, tensor_bytes, node.intra_node, node.inter_node
    ).seconds


def one_way_bandwidth(wire):
    return link(wire).bandwidth_bytes_per_s


def bus_factor(operation, n_ranks):
    return cost.bus_bandwidth(operation, n_ranks, 1, 1)


def crossover_bytes(n_ranks):
    """Where ring and pipelined tree take equally long, on links of 5 us and 50 GB/s."""
    return cost.ring_tree_crossover_bytes(n_ranks, Link(5e-6, 50e9))


def leaves_a_node(n_nodes, ranks_per_node, algorithm):
    """Bytes that leave each node, counted, as multiples of the tensor."""
    n = n_nodes * ranks_per_node
    if algorithm == "ring":
        schedule = schedules.ring_all_reduce_schedule(n)
    else:
        schedule = schedules.hierarchical_schedule(n_nodes, ranks_per_node)
    return cost.bytes_leaving_nodes(schedule, 1 / n, ranks_per_node)[0]


def padded_elements(n_elements, parts):
    return cost.padded_elements(n_elements, parts)


def line_through_times(gpu, weighting="relative"):
    """The mean relative error that time = a + bytes / B leaves."""
    return _fit(gpu, weighting).mean_relative_error


def time_on_the_line(card, size_bytes):
    return _fit(card).predict(size_bytes)


def bandwidth_on_the_line(card, size_bytes):
    return cost.bus_bandwidth("all_reduce", 8, size_bytes, time_on_the_line(card, size_bytes))


def in_switch_bandwidth_share():
    """Measured bus bandwidth of the largest all-reduce on 8 H200 over NVLink 4 one way."""
    size, seconds = all_reduce_times("h200")[-1]
    bus = cost.bus_bandwidth("all_reduce", 8, size, seconds)
    return bus / link("nvlink-4").bandwidth_bytes_per_s


def zero_sent_bytes(n_params, n_gpus, stage, micro_batches=1):
    return zero_traffic_bytes(n_params, n_gpus, stage, micro_batches)


def zero_over_data_parallel(n_gpus, stage, weight_bytes=2, grad_bytes=2, reshard=True):
    each = {"weight_bytes": weight_bytes, "grad_bytes": grad_bytes}
    zero = zero_traffic_bytes(7e9, n_gpus, stage, reshard_after_forward=reshard, **each)
    return zero / zero_traffic_bytes(7e9, n_gpus, 0, **each)


def float64_sent_bytes(n_params, n_gpus, stage, micro_batches):
    each = {"weight_bytes": 8, "grad_bytes": 8}
    return zero_traffic_bytes(n_params, n_gpus, stage, micro_batches, **each)


def sharded_gradients_sent(n_params, n_gpus, replicas, grad_bytes=2):
    """What each rank of HSDP sends across groups."""
    traffic = zero_traffic(n_params, n_gpus, 3, replicas=replicas, grad_bytes=grad_bytes)
    return traffic.items[-1].bytes_per_rank


def example_tensor_bytes():
    return tensor_parallel_traffic(**EXAMPLE, link=Link(0, 1)).items[0].tensor_bytes


def example_sent_per_all_reduce():
    return tensor_parallel_traffic(**EXAMPLE, link=Link(0, 1)).items[0].bytes_per_rank


def example_sent(n_layers=32, recompute=False):
    traffic = tensor_parallel_traffic(
        **EXAMPLE, link=Link(0, 1), n_layers=n_layers, recompute=recompute
    )
    return traffic.bytes_per_rank


def example_seconds(wire):
    wire = Link(0, link(wire).bandwidth_bytes_per_s)
    return tensor_parallel_traffic(**EXAMPLE, link=wire, n_layers=32).seconds


def example_compute_seconds(card):
    """FLOP of the weights of 32 layers, at 40% of the dense peak."""
    flops = layer_flops(4096, 4096, 1, n_layers=32).weights
    return compute_seconds(flops, 8, hardware.gpu(card), efficiency=0.4)


def transfer_over_compute(hidden):
    """Of a layer with 4096 tokens on 8 H100 and NVLink, without latency."""
    wire = Link(0, link("nvlink-4").bandwidth_bytes_per_s)
    transfer = tensor_parallel_traffic(hidden, 4096, 1, 8, wire).seconds
    return transfer / compute_seconds(layer_flops(hidden, 4096, 1).weights, 8, _H100)


def columns_only_over_megatron(phase):
    size = {**EXAMPLE, "link": Link(0, 1)}
    megatron = tensor_parallel_traffic(**size).only(block="MLP", phase=phase)
    return (
        columns_only_mlp_traffic(**size).only(phase=phase).bytes_per_rank / megatron.bytes_per_rank
    )


def boundary_bytes(hidden, tokens, directions):
    """Activations, and their gradients, that an inner pipeline rank sends in a step."""
    return directions * 2 * tokens * hidden


def stage_gradient_bytes(n_params, stages):
    """At most: what a rank of very many sends to all-reduce a stage's 16-bit gradients."""
    return 2 * 2 * n_params / stages


def _fit(card, weighting="relative"):
    sizes, seconds = zip(*all_reduce_times(card), strict=True)
    return fit_latency_bandwidth(sizes, seconds, weighting)
