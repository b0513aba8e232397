"""Bytes and seconds that tensor parallelism adds to a layer, beside the layer's compute.

h is the hidden size, s the sequence, b the micro-batch, n (`tp`) the ranks over which a layer is
cut, L the layers. All is per micro-batch and per GPU, and priced as a ring on one link.
"""

from dataclasses import dataclass

from parlab.collectives.cost import all_reduce_cost
from parlab.totals import total
from parlab.units import require_int, require_number

# A ring's reduce-scatter and its all-gather are its two halves (collectives.schedules).
SHARE_OF_ALL_REDUCE = {"all_reduce": 1.0, "reduce_scatter": 0.5, "all_gather": 0.5}


@dataclass(frozen=True)
class Item:
    """`count` equal collectives of one block in one phase.

    phase: "forward", "backward" or "recompute" (forward once more, within backward).
    tensor_bytes: of the whole tensor. bytes_per_rank: what each rank sends in all of them.
    latency_s, transfer_s: the time of all of them, in its two parts.
    """

    block: str
    phase: str
    op: str
    count: int
    tensor_bytes: float
    bytes_per_rank: float
    latency_s: float
    transfer_s: float

    @property
    def seconds(self):
        """Latency and transfer together."""
        return self.latency_s + self.transfer_s


@dataclass(frozen=True)
class TensorTraffic:
    """Items, and totals that are their sums."""

    items: tuple[Item, ...]

    count = total("count", "Number of collectives.")
    bytes_per_rank = total("bytes_per_rank", "Bytes that each rank sends.")
    latency_s = total("latency_s", "Seconds of latency.")
    transfer_s = total("transfer_s", "Seconds of transfer.")

    @property
    def seconds(self):
        """Latency and transfer together."""
        return self.latency_s + self.transfer_s

    def only(self, **fields):
        """Return the traffic of the items whose fields have the given values.

        >>> from parlab.hardware import Link
        >>> traffic = tensor_parallel_traffic(64, 8, 1, tp=2, link=Link(0, 1e9))
        >>> traffic.count, traffic.only(block="MLP", phase="forward").count
        (4, 1)
        """
        for name in fields:
            if name not in ("block", "phase", "op"):
                raise TypeError(f"only() takes block, phase and op, got {name}")
        wanted = fields.items()
        return TensorTraffic(
            tuple(i for i in self.items if all(getattr(i, name) == v for name, v in wanted))
        )


def tensor_parallel_traffic(
    hidden,
    sequence,
    micro_batch,
    tp,
    link,
    *,
    n_layers=1,
    element_bytes=2,
    recompute=False,
    sequence_parallel=False,
):
    """Traffic of attention and MLP, each cut by columns and then by rows: 2 + 2 all-reduces.

    Each all-reduce carries S = b s h element_bytes, of which a rank sends 2 (n-1)/n S (Shoeybi et
    al. 2019, section 3). `recompute` runs every layer's forward again before its backward: 2 more.
    `sequence_parallel` puts a reduce-scatter and an all-gather in the place of every all-reduce,
    the same bytes (Korthikanti et al. 2022, section 4.2.2).

    The embedding, the loss and what implementations gather a second time are not in it.

    hidden, sequence, micro_batch: h, s, b. tp: n; must divide h, and s with sequence_parallel.
    link: of each rank, one direction. n_layers: L. element_bytes: 2 for bf16.

    >>> from parlab.hardware import Link
    >>> traffic = tensor_parallel_traffic(4096, 4096, 1, 8, Link(0, 450e9), n_layers=32)
    >>> traffic.items[0].tensor_bytes, traffic.items[0].bytes_per_rank / 32
    (33554432, 58720256.0)
    >>> traffic.count, traffic.bytes_per_rank, round(traffic.seconds, 4)
    (128, 7516192768.0, 0.0167)
    """
    tensor_bytes = _tensor_bytes(hidden, sequence, micro_batch, tp, element_bytes)
    n_layers = require_int("n_layers", n_layers, minimum=1)
    if sequence_parallel and sequence % tp:
        raise ValueError(f"tp must divide the sequence of {sequence} tokens, got {tp}")
    ops = ("all_gather", "reduce_scatter") if sequence_parallel else ("all_reduce",)
    phases = ("forward", "recompute", "backward") if recompute else ("forward", "backward")
    return TensorTraffic(
        tuple(
            _item(block, phase, op, n_layers, tensor_bytes, tp, link)
            for phase in phases
            for block in ("attention", "MLP")
            for op in ops
        )
    )


def columns_only_mlp_traffic(
    hidden, sequence, micro_batch, tp, link, *, n_layers=1, element_bytes=2, ffn_hidden=None
):
    """Traffic of an MLP whose two weights are both cut by columns, with a gather after each.

    Forward: all-gathers of f/h S and of S; backward: a reduce-scatter of f/h S and an all-reduce
    of S, with S = b s h element_bytes. For f = 4h forward is 2.5 times the one all-reduce of an MLP
    cut by columns and then rows, backward 3 times.

    ffn_hidden: f, 4h if None; tp must divide it. Other arguments as in `tensor_parallel_traffic`.

    >>> from parlab.hardware import Link
    >>> size = {"hidden": 64, "sequence": 8, "micro_batch": 1, "tp": 4, "link": Link(0, 1e9)}
    >>> megatron = tensor_parallel_traffic(**size).only(block="MLP", phase="forward")
    >>> columns = columns_only_mlp_traffic(**size).only(phase="forward")
    >>> columns.bytes_per_rank / megatron.bytes_per_rank
    2.5
    """
    tensor_bytes = _tensor_bytes(hidden, sequence, micro_batch, tp, element_bytes)
    n_layers = require_int("n_layers", n_layers, minimum=1)
    width = 4 * hidden if ffn_hidden is None else ffn_hidden
    wide = _tensor_bytes(width, sequence, micro_batch, tp, element_bytes, "ffn_hidden")
    rows = (
        ("forward", "all_gather", wide),
        ("forward", "all_gather", tensor_bytes),
        ("backward", "reduce_scatter", wide),
        ("backward", "all_reduce", tensor_bytes),
    )
    return TensorTraffic(
        tuple(_item("MLP", phase, op, n_layers, size, tp, link) for phase, op, size in rows)
    )


@dataclass(frozen=True)
class LayerFlops:
    """FLOP of a layer's forward and backward: in its weights' matmuls and in attention's scores."""

    weights: float
    scores: float

    @property
    def total(self):
        """Weights and scores together."""
        return self.weights + self.scores


def layer_flops(hidden, sequence, micro_batch, *, n_layers=1, recompute=False):
    """FLOP of one micro-batch in layers of 12 h^2 weights: 6 per weight and token, and attention.

    weights = 6 x 12 h^2 b s L, scores = 12 b s^2 h L (both products with the scores, uncut by a
    causal mask). Forward is a third of each, and `recompute` adds it once more. Narayanan et al.
    (2021), appendix; that is 72 b s h^2 (1 + s / 6h) L.

    >>> flops = layer_flops(4096, 4096, 1, n_layers=32)
    >>> f"{flops.weights:.3e} {flops.scores:.3e}"
    '1.583e+14 2.639e+13'
    """
    h, s, b = _sizes(hidden, sequence, micro_batch)
    layers = require_int("n_layers", n_layers, minimum=1) * (4 if recompute else 3)
    return LayerFlops(weights=24 * h * h * b * s * layers, scores=4 * b * s * s * h * layers)


def compute_seconds(flops, tp, gpu, *, efficiency=0.4):
    """Seconds that FLOP take on tp equal cards: flops / (tp x efficiency x dense bf16 peak).

    efficiency: the share of the peak that a run reaches, 0.4 being common for large matmuls; it
    falls as tp makes the matmuls smaller, which this does not model.

    >>> from parlab.hardware import gpu
    >>> flops = layer_flops(4096, 4096, 1, n_layers=32).weights
    >>> [round(compute_seconds(flops, 8, gpu(card)), 3) for card in ("h100-sxm", "a100-80")]
    [0.05, 0.159]
    """
    flops = require_number("flops", flops, minimum=0)
    tp = require_int("tp", tp, minimum=1)
    efficiency = require_number("efficiency", efficiency, minimum=0, exclusive=True)
    if efficiency > 1:
        raise ValueError(f"efficiency must be a share of the peak, at most 1, got {efficiency}")
    if gpu.bf16_flop_per_s is None:
        raise ValueError(f"gpu must have bf16 tensor cores, got {gpu.name}: it has no bf16 peak")
    return flops / (tp * efficiency * gpu.bf16_flop_per_s)


def _sizes(hidden, sequence, micro_batch, name="hidden"):
    return (
        require_int(name, hidden, minimum=1),
        require_int("sequence", sequence, minimum=1),
        require_int("micro_batch", micro_batch, minimum=1),
    )


def _tensor_bytes(features, sequence, micro_batch, tp, element_bytes, name="hidden"):
    features, sequence, micro_batch = _sizes(features, sequence, micro_batch, name)
    tp = require_int("tp", tp, minimum=1)
    if features % tp:
        raise ValueError(f"tp must divide {name} = {features}, got {tp}: a layer is cut evenly")
    return (
        features * sequence * micro_batch * require_int("element_bytes", element_bytes, minimum=1)
    )


def _item(block, phase, op, count, tensor_bytes, tp, link):
    cost = all_reduce_cost(tp, tensor_bytes, link)
    share = SHARE_OF_ALL_REDUCE[op] * count
    latency = cost.steps * link.latency_s
    return Item(
        block,
        phase,
        op,
        count,
        tensor_bytes,
        bytes_per_rank=share * cost.bytes_per_rank,
        latency_s=share * latency,
        transfer_s=share * cost.bytes_per_rank / link.bandwidth_bytes_per_s,
    )
