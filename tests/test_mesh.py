"""Which rank talks to whom: Megatron Core's examples, torch's DeviceMesh and NumPy's axes."""

import re
import time
from collections import Counter
from itertools import product
from math import prod
from types import SimpleNamespace

import numpy as np
import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh

import parlab as pl
from parlab.distributed import compat
from parlab.mesh import GROUPS, MOST_LISTED, Mesh
from parlab.planner.efficiencies import FITTED
from parlab.planner.network import neighbour_route, route

DEGREES = ("dp", "tp", "pp", "cp")


def listed(text):
    """[g0, g2], [g1, g3] as [[0, 2], [1, 3]]."""
    return [[int(g) for g in re.findall(r"\d+", group)] for group in re.findall(r"\[(.*?)\]", text)]


# Printed in the docstring of initialize_model_parallel, megatron/core/parallel_state.py.
SIXTEEN = {
    "dp": "[g0, g2], [g1, g3], [g4, g6], [g5, g7], [g8, g10], [g9, g11], [g12, g14], [g13, g15]",
    "tp": "[g0, g1], [g2, g3], [g4, g5], [g6, g7], [g8, g9], [g10, g11], [g12, g13], [g14, g15]",
    "pp": "[g0, g4, g8, g12], [g1, g5, g9, g13], [g2, g6, g10, g14], [g3, g7, g11, g15]",
}


@pytest.mark.parametrize("axis", SIXTEEN)
def test_16_gpus_have_the_groups_that_megatron_core_prints(axis):
    assert Mesh(dp=2, tp=2, pp=4).groups(axis) == listed(SIXTEEN[axis])


def test_context_parallel_groups_of_8_gpus_as_megatron_core_prints_them():
    assert Mesh(tp=4, cp=2).groups("cp") == [[0, 4], [1, 5], [2, 6], [3, 7]]


def test_the_order_tp_pp_dp_as_megatron_core_prints_it():
    # generate_masked_orthogonal_rank_groups: 8 GPUs, 'tp-pp-dp' of sizes 2-2-2.
    mesh = Mesh(dp=2, tp=2, pp=2, order="tp-cp-ep-pp-dp")
    assert mesh.groups("dp") == [[0, 4], [1, 5], [2, 6], [3, 7]]


def test_sizes_2_3_4_as_megatron_core_prints_them():
    groups = Mesh(tp=2, dp=3, pp=4, gpus_per_node=24).groups("dp")
    assert (groups[0], groups[1], groups[7]) == ([0, 2, 4], [1, 3, 5], [19, 21, 23])


def test_groups_cut_by_neighbours_are_the_levels_that_megatron_core_prints():
    # create_hierarchical_groups: 16 ranks cut by 2, 2 and 4, the first and the last level.
    mesh = Mesh(dp=16, ep=2)
    assert mesh.groups("ep") == [[2 * i, 2 * i + 1] for i in range(8)]
    assert mesh.groups("edp") == [list(range(0, 16, 2)), list(range(1, 16, 2))]
    assert Mesh(dp=16, ep=4).groups("edp") == listed(SIXTEEN["pp"])


degrees = st.fixed_dictionaries({axis: st.integers(1, 4) for axis in DEGREES})
orders = st.permutations(("tp", "cp", "ep", "dp", "pp")).map("-".join)


def by_reshape(order, sizes, together):
    """Groups by NumPy: ranks counted through an array, the axes of a group moved to its end."""
    outermost_first = order[::-1]
    ranks = np.arange(prod(sizes.values())).reshape([sizes[axis] for axis in outermost_first])
    mine = [axis for axis in outermost_first if axis in together]
    places = [outermost_first.index(axis) for axis in mine]
    moved = np.moveaxis(ranks, places, range(-len(places), 0))
    groups = moved.reshape(-1, prod(sizes[axis] for axis in mine))
    return sorted(groups.tolist())


def divisors(n):
    return [d for d in range(1, n + 1) if n % d == 0]


@given(degrees, orders)
def test_every_order_counts_ranks_through_an_array_of_the_axes(sizes, order):
    mesh = Mesh(**sizes, order=order, gpus_per_node=1)
    axes = [axis for axis in order.split("-") if axis != "ep"]
    for axis in DEGREES:
        assert mesh.groups(axis) == by_reshape(axes, sizes, [axis])
    assert mesh.groups("zero") == by_reshape(axes, sizes, ["dp", "cp"])


@given(degrees, st.permutations(("cp", "ep", "dp")), st.data())
def test_experts_have_an_array_of_their_own_where_pipelines_are_outside_as_in_megatron_core(
    sizes, between, data
):
    # Megatron Core builds a second grid, tp x ep x dp x pp, with ep x dp = the first one's dp x cp,
    # and requires that pipelines and tensors have the same groups in both.
    order = "-".join(("tp", *between, "pp"))
    ep = data.draw(st.sampled_from(divisors(sizes["dp"] * sizes["cp"])))
    mesh = Mesh(**sizes, ep=ep, order=order, gpus_per_node=1)
    grid = {axis: sizes[axis] for axis in ("tp", "pp")}
    grid |= {"ep": ep, "dp": sizes["dp"] * sizes["cp"] // ep}
    axes = [axis for axis in order.split("-") if axis != "cp"]
    assert mesh.groups("ep") == by_reshape(axes, grid, ["ep"])
    assert mesh.groups("edp") == by_reshape(axes, grid, ["dp"])


@given(degrees, st.data())
def test_hsdp_is_an_array_whose_data_axis_is_cut_in_two(sizes, data):
    shard = data.draw(st.sampled_from(divisors(sizes["dp"] * sizes["cp"])))
    mesh = Mesh(**sizes, shard=shard, gpus_per_node=1)
    cut = {"replicate": sizes["dp"] * sizes["cp"] // shard, "shard": shard}
    cut |= {axis: sizes[axis] for axis in ("tp", "pp")}
    for axis in ("shard", "replicate"):
        assert mesh.groups(axis) == by_reshape(("tp", "shard", "replicate", "pp"), cut, [axis])


@given(degrees, orders, st.data())
def test_every_rank_is_once_in_each_kind_of_group_and_asks_for_the_one_in_the_list(
    sizes, order, data
):
    replicas = sizes["dp"] * sizes["cp"]
    ep, shard = (data.draw(st.sampled_from(divisors(replicas))) for _ in range(2))
    mesh = Mesh(**sizes, ep=ep, shard=shard, order=order, gpus_per_node=1)
    for axis in GROUPS:
        groups = mesh.groups(axis)
        assert sorted(sum(groups, [])) == list(range(mesh.world))
        assert {len(group) for group in groups} == {mesh.size(axis)}
        rank = data.draw(st.integers(0, mesh.world - 1))
        (mine,) = (group for group in groups if rank in group)
        assert list(mesh.group(axis, rank).ranks) == mine
        assert mine[mesh.place(axis, rank)] == rank


def torch_groups(rank, shape, names, parts):
    """The ranks of a torch DeviceMesh's process groups, or of its sub-meshes of several axes."""
    with compat.fake_process_group(prod(shape), rank):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        return [
            mesh[part].mesh.flatten().tolist()
            if isinstance(part, tuple)
            else dist.get_process_group_ranks(mesh.get_group(part))
            for part in parts
        ]


@pytest.mark.parametrize("rank", [0, 13, 22, 47])
def test_torch_has_the_same_groups_when_its_axes_are_listed_the_other_way_round(rank):
    parts = ["pp", "dp", "cp", "tp", ("dp", "cp")]
    in_torch = torch_groups(rank, (2, 3, 2, 4), ("pp", "dp", "cp", "tp"), parts)
    mesh = Mesh(pp=2, dp=3, cp=2, tp=4)
    for axis, ranks in zip(["pp", "dp", "cp", "tp", "zero"], in_torch, strict=True):
        assert list(mesh.group(axis, rank).ranks) == ranks


@pytest.mark.parametrize("rank", [0, 7, 30])
def test_hsdp_groups_are_those_of_torchs_two_axes(rank):
    names = ("dp_replicate", "dp_shard", "tp")
    in_torch = torch_groups(rank, (4, 4, 2), names, names)
    mesh = Mesh(dp=16, tp=2, shard=4)
    for axis, ranks in zip(("replicate", "shard", "tp"), in_torch, strict=True):
        assert list(mesh.group(axis, rank).ranks) == ranks


@pytest.mark.parametrize(
    "mesh, in_a_node",
    [
        pytest.param(Mesh(tp=8, dp=4), {"tp": 8, "dp": 1, "zero": 1}, id="a node for tensors"),
        pytest.param(Mesh(tp=16, dp=2), {"tp": 8, "dp": 1}, id="tensors over two nodes"),
        pytest.param(Mesh(tp=2, dp=8, pp=4), {"tp": 2, "dp": 4, "pp": 1}, id="4 replicas a node"),
        pytest.param(Mesh(tp=4, cp=2, dp=4), {"cp": 2, "dp": 1, "zero": 2}, id="context inside"),
        pytest.param(Mesh(dp=16, ep=8, shard=8), {"ep": 8, "edp": 1, "shard": 8}, id="experts"),
        pytest.param(Mesh(dp=16, ep=4), {"ep": 4, "edp": 2}, id="experts twice in a node"),
        pytest.param(Mesh(tp=4), {"tp": 4, "dp": 1}, id="half a node"),
    ],
)
def test_how_many_ranks_of_a_group_share_a_node_of_8(mesh, in_a_node):
    for axis, expected in in_a_node.items():
        for rank in range(mesh.world):
            assert mesh.group(axis, rank).ranks_per_node == expected


def test_where_a_group_lies_unevenly_over_nodes_the_smallest_number_counts():
    mesh = Mesh(tp=3, dp=8)
    assert [mesh.group("tp", rank).ranks_per_node for rank in (0, 6, 9)] == [3, 1, 3]
    assert [mesh.group("tp", rank).crosses_node for rank in (0, 6, 9)] == [False, True, False]


@given(degrees, st.data())
def test_a_group_crosses_nodes_exactly_if_two_of_its_ranks_have_different_nodes(sizes, data):
    world = prod(sizes.values())
    per_node = data.draw(st.sampled_from([*divisors(world), world + 1]))
    mesh = Mesh(**sizes, gpus_per_node=per_node)
    axis, rank = data.draw(st.sampled_from(tuple(GROUPS))), data.draw(st.integers(0, world - 1))
    group = mesh.group(axis, rank)
    nodes = Counter(int(np.floor(each / per_node)) for each in group.ranks)
    assert group.crosses_node == (len(nodes) > 1)
    assert group.ranks_per_node == min(nodes.values())


def test_llama_3_405b_keeps_tensors_in_a_node_with_its_own_order():
    # arXiv 2407.21783, section 3.3.2: [TP, CP, PP, DP]; table 4: 16,384 GPUs, 8 x 1 x 16 x 128.
    mesh = Mesh(tp=8, cp=1, pp=16, dp=128, order="tp-cp-ep-pp-dp", world=16_384)
    assert [mesh.group(axis, 0).crosses_node for axis in ("tp", "pp", "dp")] == [False, True, True]
    assert mesh.group("pp", 0).ranks == tuple(range(0, 128, 8))
    assert mesh.group("dp", 0).ranks == tuple(range(0, 16_384, 128))


def test_a_group_waits_for_the_slowest_link_on_its_way():
    cluster = pl.cluster("hgx-h100", n_nodes=4)
    mesh = Mesh(tp=8, dp=4)
    assert mesh.group("tp", 0).link(cluster) == pl.link("nvlink-4")
    assert mesh.group("dp", 0).link(cluster) == pl.link("infiniband-400g")
    assert mesh.group("pp", 0).link(cluster) == pl.link("nvlink-4")  # no one to talk to
    alone = pl.Cluster(cluster.gpu, 8, cluster.intra_node)
    with pytest.raises(ValueError, match="inter_node .* dp group of ranks 0 to 24 leaves its node"):
        mesh.group("dp", 0).link(alone)


def test_the_planner_sends_each_axis_over_the_links_that_its_groups_cross():
    # It knows a group by its size and the distance of its ranks, not rank by rank.
    for tp, cp, dp, pp in product((1, 2, 4, 8, 16), (1, 2, 4), (1, 2, 4), (1, 2)):
        mesh = Mesh(tp=tp, cp=cp, dp=dp, pp=pp, gpus_per_node=min(8, tp * cp * dp * pp))
        cluster = pl.cluster("hgx-h100", n_nodes=-(-mesh.world // 8))
        for axis, stride in (("tp", 1), ("cp", tp), ("zero", tp)):
            if mesh.size(axis) == 1:
                continue
            crosses = any(mesh.group(axis, rank).crosses_node for rank in range(mesh.world))
            assert route(cluster, FITTED, mesh.size(axis), stride).crosses == crosses
        if pp > 1 and mesh.world > 8:
            stages = [mesh.group("pp", rank).ranks for rank in range(mesh.world)]
            crosses = any(first // 8 != second // 8 for first, second, *_ in stages)
            assert neighbour_route(cluster, FITTED, tp * cp * dp).crosses == crosses


def test_anything_with_the_five_degrees_is_a_layout():
    layout = SimpleNamespace(dp=4, tp=2, pp=2, cp=2, ep=4, zero=1, micro_batch=1)
    assert Mesh.of(layout, 4, shard=2) == Mesh(4, 2, 2, 2, 4, gpus_per_node=4, shard=2)


def test_coordinates_are_the_places_in_the_groups():
    mesh = Mesh(tp=2, cp=3, dp=4, pp=5, ep=6)
    for rank in range(mesh.world):
        for axis, place in mesh.coordinates(rank).items():
            assert mesh.group(axis, rank).ranks[place] == rank


@pytest.mark.parametrize(
    "arguments, said",
    [
        pytest.param(
            {"dp": 2, "tp": 4, "world": 16},
            "world must be dp x tp x pp x cp, got 16, but dp 2 x tp 4 x pp 1 x cp 1 = 8",
            id="product",
        ),
        pytest.param({"dp": 6, "cp": 2, "ep": 8}, "ep must divide dp x cp = 6 x 2 = 12", id="ep"),
        pytest.param({"dp": 6, "shard": 4}, "shard must divide dp x cp = 6 x 1 = 6", id="shard"),
        pytest.param({"dp": 3, "tp": 4}, "gpus_per_node .* = 12 GPUs, got 8", id="node"),
        pytest.param({"dp": 0}, "dp must be an int from 1", id="no replica"),
        pytest.param({"gpus_per_node": 0}, "gpus_per_node must be", id="empty node"),
        pytest.param({"order": "tp-dp-pp"}, "order must hold each of tp, cp, ep, dp", id="order"),
        pytest.param({"order": None}, "order must hold", id="no order"),
        pytest.param({"dp": 10**400}, "dp must be .* an int of 1329 bits", id="absurd"),
        pytest.param({"dp": 10**4, "tp": 10**4}, "at most 10000000 GPUs, got 100000000", id="all"),
    ],
)
def test_a_broken_law_is_named(arguments, said):
    with pytest.raises(ValueError, match=said):
        Mesh(**arguments)


@pytest.mark.parametrize("wrong", [2.0, True, "2", None])
def test_a_degree_is_a_whole_number(wrong):
    with pytest.raises(TypeError, match="tp must be an int"):
        Mesh(tp=wrong)


@pytest.mark.parametrize("rank", [-1, 8])
def test_a_rank_that_is_not_there_is_refused(rank):
    for ask in (Mesh(tp=8).coordinates, lambda rank: Mesh(tp=8).group("tp", rank)):
        with pytest.raises(ValueError, match="rank must be an int from 0 to 7"):
            ask(rank)


def test_an_unknown_axis_is_answered_with_the_known_ones():
    with pytest.raises(ValueError, match="axis must be one of tp, cp, dp, pp, zero"):
        Mesh().groups("data")


def test_a_million_gpus_are_answered_at_once():
    start = time.perf_counter()
    mesh = Mesh(tp=8, cp=4, pp=16, dp=2**11, ep=64, shard=256)
    assert mesh.world == MOST_LISTED
    for axis in GROUPS:
        group = mesh.group(axis, 654_321)
        assert 654_321 in group.ranks and len(group.ranks) == mesh.size(axis)
    assert len(mesh.groups("tp")) == 2**17
    assert time.perf_counter() - start < 5  # 0.3 s on a quiet machine
    with pytest.raises(ValueError, match="at most 1048576 ranks .* ask group"):
        Mesh(tp=16, dp=2**17).groups("tp")
