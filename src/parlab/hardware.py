"""Data sheets as records: links, GPUs, and nodes joined by a network.

Every bandwidth is one way and every FLOP/s dense; `data/hardware.toml` holds each value with its
source and the day on which it was last compared with it.
"""

from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import NamedTuple

from parlab.units import require_choice, require_int, require_number


@dataclass(frozen=True)
class Link:
    """A connection in one direction: n bytes take latency_s + n / bandwidth_bytes_per_s.

    ``latency_kind`` says what stands behind the latency: "given" by the caller, or in the data
    sheet "fitted" to a measured table, "cited" from a source, or "assumed".

    >>> Link(latency_s=5e-6, bandwidth_bytes_per_s=0)
    Traceback (most recent call last):
    ...
    ValueError: bandwidth_bytes_per_s must be a finite number above 0, got 0: nothing would arrive
    """

    latency_s: float
    bandwidth_bytes_per_s: float
    name: str = ""
    kind: str = ""
    latency_kind: str = "given"
    latency_source: str = ""
    source: str = ""
    as_of: str = ""
    notes: str = ""

    def __post_init__(self):
        _check(self, "latency_s", minimum=0)
        _check(self, "bandwidth_bytes_per_s", exclusive=True, why="nothing would arrive")


@dataclass(frozen=True)
class GPU:
    """One card. Plan with usable_bytes: memory_bytes is only the number in its name.

    memory_bytes: the data sheet's GB taken as 10^9 bytes.
    usable_bytes: what the driver reports as total memory.
    bf16_flop_per_s, fp16_flop_per_s, fp32_flop_per_s: dense peak; None where there are no such
        units (a T4 has no bf16 tensor cores).
    register_bytes_per_sm, l1_bytes_per_sm: per streaming multiprocessor, of which there are n_sms;
        L1 and shared memory are one pool.
    l1_bandwidth_bytes_per_s, l2_bandwidth_bytes_per_s: of the whole card; None without a source.
    """

    name: str
    memory_bytes: float
    usable_bytes: int
    fp16_flop_per_s: float
    fp32_flop_per_s: float
    memory_bandwidth_bytes_per_s: float
    bf16_tensor_cores: bool
    bf16_flop_per_s: float | None = None
    n_sms: int | None = None
    register_bytes_per_sm: int | None = None
    l1_bytes_per_sm: int | None = None
    l1_bandwidth_bytes_per_s: float | None = None
    l2_bytes: int | None = None
    l2_bandwidth_bytes_per_s: float | None = None
    source: str = ""
    usable_source: str = ""
    cache_source: str = ""
    as_of: str = ""
    notes: str = ""

    def __post_init__(self):
        for field in (
            "memory_bytes",
            "usable_bytes",
            "fp16_flop_per_s",
            "fp32_flop_per_s",
            "memory_bandwidth_bytes_per_s",
        ):
            _check(self, field, exclusive=True)
        if self.bf16_tensor_cores != (self.bf16_flop_per_s is not None):
            raise ValueError(
                f"bf16_flop_per_s must be given exactly when bf16_tensor_cores is true, got "
                f"{self.bf16_flop_per_s} with {self.bf16_tensor_cores}: without tensor cores bf16 "
                "is emulated, and its rate is not a data-sheet figure"
            )


@dataclass(frozen=True)
class Cluster:
    """Equal nodes of equal GPUs; n_gpus = gpus_per_node x n_nodes.

    intra_node: link of one GPU to the others in its node.
    inter_node: link that one GPU has to other nodes, for itself; None for a single host.
    """

    gpu: GPU
    gpus_per_node: int
    intra_node: Link
    inter_node: Link | None = None
    n_nodes: int = 1
    name: str = ""
    source: str = ""
    as_of: str = ""
    notes: str = ""

    def __post_init__(self):
        require_int("gpus_per_node", self.gpus_per_node, minimum=1)
        require_int("n_nodes", self.n_nodes, minimum=1)
        if self.n_nodes > 1 and self.inter_node is None:
            raise ValueError(
                f"n_nodes must be 1 without an inter_node link, got {self.n_nodes}: "
                f"nothing connects the nodes of {self.name or 'this cluster'}"
            )

    def __hash__(self):
        return self._hash

    @cached_property
    def _hash(self):
        """Of what tells clusters apart, once: a search looks answers up by its cluster."""
        return hash((self.gpu.name, self.intra_node.name, self.gpus_per_node, self.n_nodes))

    @property
    def n_gpus(self):
        """All GPUs of the cluster, the world size of a job that fills it."""
        return self.gpus_per_node * self.n_nodes


class Rung(NamedTuple):
    """A level of the bandwidth ladder: what one GPU reads from, how large, how fast one way."""

    name: str
    size_bytes: float | None
    bandwidth_bytes_per_s: float


def link(name):
    """Return a link of the data sheet by name, without regard to case.

    >>> link("NVLink-4").bandwidth_bytes_per_s
    450000000000.0

    Raises ValueError with the nearest names for an unknown one.
    """
    key = require_choice("link name", name, _sheet()["links"])
    return Link(name=key, **_sheet()["links"][key])


def gpu(name):
    """Return a GPU of the data sheet by name, without regard to case.

    >>> round(gpu("a100-80").usable_bytes / 2**30, 2)  # not 80
    79.25

    Raises ValueError with the nearest names for an unknown one.
    """
    key = require_choice("gpu name", name, _sheet()["gpus"])
    return GPU(name=key, **_sheet()["gpus"][key])


def cluster(name, n_nodes=1):
    """Return n_nodes nodes of a kind in the data sheet, by name without regard to case.

    >>> cluster("hgx-h100", n_nodes=4).n_gpus
    32

    Raises ValueError with the nearest names for an unknown one.
    """
    key = require_choice("cluster name", name, _sheet()["clusters"])
    row = dict(_sheet()["clusters"][key])
    row["gpu"] = gpu(row["gpu"])
    for field in ("intra_node", "inter_node"):
        if field in row:
            row[field] = link(row[field])
    return Cluster(name=key, n_nodes=n_nodes, **row)


def bandwidth_ladder(cluster):
    """Return the levels from which one GPU gets its data, nearest first, as Rungs.

    A level whose bandwidth no source states is left out. Links have no size.

    >>> [rung.name for rung in bandwidth_ladder(cluster("hgx-h100"))]
    ['L1 / shared memory', 'L2', 'memory', 'nvlink-4', 'infiniband-400g']
    """
    card = cluster.gpu
    l1_bytes = card.n_sms * card.l1_bytes_per_sm if card.n_sms and card.l1_bytes_per_sm else None
    rungs = [
        Rung("L1 / shared memory", l1_bytes, card.l1_bandwidth_bytes_per_s),
        Rung("L2", card.l2_bytes, card.l2_bandwidth_bytes_per_s),
        Rung("memory", card.usable_bytes, card.memory_bandwidth_bytes_per_s),
    ]
    for wire in (cluster.intra_node, cluster.inter_node):
        if wire is not None:
            rungs.append(Rung(wire.name, None, wire.bandwidth_bytes_per_s))
    return tuple(rung for rung in rungs if rung.bandwidth_bytes_per_s is not None)


def _check(record, field, **rule):
    value = require_number(field, getattr(record, field), **{"minimum": 0, **rule})
    object.__setattr__(record, field, value)  # the safe form, for example int for a NumPy int32


@cache
def _sheet():
    import tomllib  # takes long to load in a browser, and a Link of one's own needs no sheet

    path = Path(__file__).parent / "data" / "hardware.toml"
    return tomllib.loads(path.read_text(encoding="utf-8"))
