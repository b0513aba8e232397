"""Which rank talks to whom: the group of every axis, and whether it stays inside a node.

A rank is a number whose digits are its coordinates: rank = sum of coordinate x stride, and the
stride of an axis is the product of the degrees further in. The order of axes is written from the
innermost outwards, as Megatron Core's default "tp-cp-ep-dp-pp" is
(megatron/core/parallel_state.py, equation 1 of generate_masked_orthogonal_rank_groups). torch's
DeviceMesh lists the same axes the other way round, the outermost first.

Nodes are filled in the order of ranks, so an inner axis stays in a node and an outer one leaves it.
"""

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from parlab.units import require_choice, require_int

ORDER = "tp-cp-ep-dp-pp"
GROUPS = {
    "tp": "tensor parallel",
    "cp": "context parallel",
    "dp": "data parallel",
    "pp": "pipeline parallel",
    "zero": "data x context parallel, over which ZeRO shards",
    "ep": "expert parallel",
    "edp": "expert data parallel",
    "shard": "ranks that share one copy of the states (HSDP)",
    "replicate": "ranks that hold the same shard (HSDP)",
}
AXES = ("tp", "cp", "dp", "pp")  # each rank has one coordinate on each of them
MOST_RANKS = 10**7  # of a world; a group of so many is still a tuple that fits in memory
MOST_LISTED = 2**20  # of a world whose groups are listed all at once


class Group(NamedTuple):
    """The ranks of one group, ascending, and how many of them share a node.

    ranks_per_node: the smallest number, where nodes hold different ones, since an algorithm that
        works by levels cannot use more.
    """

    axis: str
    ranks: tuple[int, ...]
    ranks_per_node: int

    @property
    def crosses_node(self):
        """Whether its messages leave a node."""
        return self.ranks_per_node < len(self.ranks)

    def link(self, cluster):
        """Return the slowest link that a ring over the group waits for, in such a cluster.

        Raises ValueError where the group leaves its node and nothing connects the nodes.
        """
        if not self.crosses_node:
            return cluster.intra_node
        if cluster.inter_node is None:
            raise ValueError(
                f"cluster must have an inter_node link, got none: the {self.axis} group of ranks "
                f"{self.ranks[0]} to {self.ranks[-1]} leaves its node"
            )
        return cluster.inter_node


@dataclass(frozen=True)
class Mesh:
    """The ranks of dp x tp x pp x cp GPUs, filled node by node.

    Experts have no ranks of their own: they are dealt out over the ranks that data and context
    parallelism have. Of these, `ep` neighbours hold different experts, and every ep-th rank holds
    the same ones, the expert-data-parallel group of dp cp / ep ranks. HSDP cuts the same ranks in
    the same way: `shard` neighbours share one copy of the states, every shard-th holds the same
    part of it.

    Parameters
    ----------
    dp, tp, pp, cp : degrees; their product is the number of GPUs.
    ep : ranks over which experts are dealt out; divides dp x cp.
    gpus_per_node : GPUs that share the fast link. Nodes are full, unless there is only one.
    order : the five axes, innermost first. Where ep stands behind dp, the ranks of an expert group
        are not neighbours but dp cp / ep apart.
    shard : ranks that share one copy of the states; None for all dp x cp, as in ZeRO and FSDP.
    world : if given, what the degrees must multiply to.

    Raises ValueError with the law that is broken, TypeError for a degree that is no whole number.

    Megatron Core's own example, 16 GPUs with 2 for tensors and 4 for the pipeline:

    >>> mesh = Mesh(dp=2, tp=2, pp=4)
    >>> mesh.groups("dp")[:3]
    [[0, 2], [1, 3], [4, 6]]
    >>> mesh.group("pp", rank=1)
    Group(axis='pp', ranks=(1, 5, 9, 13), ranks_per_node=2)
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    gpus_per_node: int = 8
    order: str = ORDER
    shard: int | None = None
    world: int | None = None

    def __post_init__(self):
        for name in (*AXES, "ep", "gpus_per_node"):
            degree = require_int(name, getattr(self, name), minimum=1, maximum=MOST_RANKS)
            self._set(name, degree)
        _check_order(self.order)
        product = self.dp * self.tp * self.pp * self.cp
        factors = " x ".join(f"{name} {getattr(self, name)}" for name in ("dp", "tp", "pp", "cp"))
        if self.world is not None and require_int("world", self.world, minimum=1) != product:
            raise ValueError(
                f"world must be dp x tp x pp x cp, got {self.world}, but {factors} = {product}"
            )
        if product > MOST_RANKS:
            raise ValueError(f"{factors} must be at most {MOST_RANKS} GPUs, got {product}")
        self._set("world", product)
        replicas = self.dp * self.cp
        if replicas % self.ep:
            raise ValueError(
                f"ep must divide dp x cp = {self.dp} x {self.cp} = {replicas}, got {self.ep}: "
                "experts are dealt out over those ranks"
            )
        shard = replicas if self.shard is None else self.shard
        self._set("shard", require_int("shard", shard, minimum=1))
        if replicas % self.shard:
            raise ValueError(
                f"shard must divide dp x cp = {self.dp} x {self.cp} = {replicas}, got "
                f"{self.shard}: every copy of the states is cut into as many parts"
            )
        if product > self.gpus_per_node and product % self.gpus_per_node:
            raise ValueError(
                f"gpus_per_node must divide the world of {factors} = {product} GPUs, got "
                f"{self.gpus_per_node}: with more than one node every node is full"
            )

    def _set(self, name, value):
        object.__setattr__(self, name, value)

    @classmethod
    def of(cls, layout, gpus_per_node=8, **others):
        """Return the mesh of anything with the degrees dp, tp, pp, cp and ep, such as a Layout.

        Its replicas of shards (HSDP), if it has some, are those of the mesh.

        >>> from parlab.planner.layout import Layout
        >>> Mesh.of(Layout(dp=8, zero=3, replicas=2)).groups("shard")
        [[0, 1, 2, 3], [4, 5, 6, 7]]
        """
        degrees = {name: getattr(layout, name) for name in (*AXES, "ep")}
        degrees["shard"] = getattr(layout, "shards", None)
        return cls(**{**degrees, "gpus_per_node": gpus_per_node, **others})

    def size(self, axis):
        """Return how many ranks each group of an axis has; `axis` is a name from GROUPS."""
        axis = require_choice("axis", axis, GROUPS)
        replicas = self.dp * self.cp
        sizes = {"zero": replicas, "edp": replicas // self.ep, "replicate": replicas // self.shard}
        return sizes[axis] if axis in sizes else getattr(self, axis)

    def group(self, axis, rank):
        """Return the Group of one rank, in time and memory of its size, whatever the world.

        >>> Mesh(dp=2**17, tp=8).group("tp", rank=1_000_000).ranks
        (1000000, 1000001, 1000002, 1000003, 1000004, 1000005, 1000006, 1000007)
        """
        ranks = self._ranks(axis, self._checked(rank))
        nodes = Counter(each // self.gpus_per_node for each in ranks)
        return Group(axis, tuple(ranks), min(nodes.values()))

    def groups(self, axis):
        """Return the ranks of all groups of an axis, as lists, ordered by their first rank.

        Raises ValueError for a world of more than MOST_LISTED ranks: ask `group` for one of them.
        """
        axis = require_choice("axis", axis, GROUPS)
        if self.world > MOST_LISTED:
            raise ValueError(
                f"world must have at most {MOST_LISTED} ranks for a list of all groups, got "
                f"{self.world}: ask group(axis, rank) for those of one rank"
            )
        if axis in AXES:
            size, stride = self.size(axis), self._strides[axis]
            return [
                list(range(first, first + size * stride, stride))
                for block in range(0, self.world, size * stride)
                for first in range(block, block + stride)
            ]
        places = self._all_places(axis)
        return sorted(self._at(first, each) for first in self._firsts() for each in places)

    def coordinates(self, rank):
        """Return the place of a rank in each of its groups but ZeRO's and HSDP's.

        >>> Mesh(dp=4, tp=2, pp=2, ep=2).coordinates(13)
        {'tp': 1, 'cp': 0, 'dp': 2, 'pp': 1, 'ep': 0, 'edp': 1}
        """
        rank = self._checked(rank)
        return {axis: self.place(axis, rank) for axis in (*AXES, "ep", "edp")}

    def place(self, axis, rank):
        """Return where in its group of an axis a rank stands, counted from 0."""
        axis, rank = require_choice("axis", axis, GROUPS), self._checked(rank)
        if axis in AXES:
            return rank // self._strides[axis] % self.size(axis)
        inner, outer = self._replicas
        within = self.place(inner, rank) + self.size(inner) * self.place(outer, rank)
        if axis == "zero":
            return within
        neighbours, n = self._neighbours(axis)
        return within % n if axis == neighbours else within // n

    def _ranks(self, axis, rank):
        place, size = self.place(axis, rank), self.size(axis)
        if axis in AXES:
            stride = self._strides[axis]
            first = rank - place * stride
            return range(first, first + size * stride, stride)
        within = self.place("zero", rank)
        (start,) = self._at(0, [within])
        step = 1
        if axis != "zero":
            neighbours, n = self._neighbours(axis)
            step = 1 if axis == neighbours else n
        first = within - place * step
        return self._at(rank - start, range(first, first + size * step, step))

    @cached_property
    def _strides(self):
        strides, stride = {}, 1
        for axis in self.order.split("-"):
            if axis != "ep":
                strides[axis] = stride
                stride *= getattr(self, axis)
        return strides

    @cached_property
    def _replicas(self):
        """The two axes over which weights are replicated, the inner one first."""
        return sorted(("cp", "dp"), key=self.order.index)

    def _neighbours(self, axis):
        """Which of the two groups that cut `zero` takes neighbours, and how many."""
        if axis in ("shard", "replicate"):
            return "shard", self.shard
        inner = "ep" if self.order.index("ep") < self.order.index("dp") else "edp"
        return inner, self.size(inner)

    def _firsts(self):
        """The first rank of every group of `zero`."""
        inner, outer = (self._strides[axis] for axis in self._replicas)
        return (
            rank
            for far in range(0, self.world, outer * self.size(self._replicas[1]))
            for near in range(far, far + outer, inner * self.size(self._replicas[0]))
            for rank in range(near, near + inner)
        )

    def _all_places(self, axis):
        """How the places 0, 1, ... of a group of `zero` are dealt out to the groups of an axis."""
        total = self.size("zero")
        if axis == "zero":
            return [range(total)]
        neighbours, n = self._neighbours(axis)
        if axis == neighbours:
            return [range(first, first + n) for first in range(0, total, n)]
        return [range(first, total, n) for first in range(n)]

    def _at(self, first, places):
        """The ranks at some places of the group of `zero` that begins with rank `first`."""
        inner, outer = (self._strides[axis] for axis in self._replicas)
        n = self.size(self._replicas[0])
        return [first + place % n * inner + place // n * outer for place in places]

    def _checked(self, rank):
        return require_int(
            "rank", rank, minimum=0, maximum=self.world - 1, why="ranks count from 0"
        )


def _check_order(order):
    if not isinstance(order, str) or sorted(order.split("-")) != sorted(ORDER.split("-")):
        raise ValueError(
            f"order must hold each of tp, cp, ep, dp, pp once, innermost first, such as {ORDER!r}, "
            f"got {order!r}"
        )
