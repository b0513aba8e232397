"""Measured runs of published tables, as arguments of `estimate`."""

from dataclasses import dataclass, replace
from functools import cache

from parlab.hardware import cluster, gpu
from parlab.models import ModelConfig, model
from parlab.planner.efficiencies import FITTED
from parlab.planner.estimate import estimate
from parlab.planner.layout import Layout
from parlab.published import published_table

FITTED_TABLES = ("iteration-time", "weak-scaling", "fsdp2-llama-3-8b")
HELD_OUT_TABLES = (
    "megatron-peak-memory",
    "torchtitan-a100",
    "mpt-a100-80",
    "mpt-a100-40",
    "mpt-h100-80",
    "kempner-h200",
)
_MPT_SHAPES = {  # layers, hidden, heads: LLM Foundry, scripts/train/yamls/pretrain/mpt-*.yaml
    "125m": (12, 768, 12),
    "350m": (24, 1024, 16),
    "760m": (24, 1536, 12),
    "1b": (24, 2048, 16),
    "3b": (32, 2560, 20),
    "7b": (32, 4096, 32),
    "13b": (40, 5120, 40),
    "30b": (48, 7168, 56),
    "70b": (80, 8192, 64),
}
_KEMPNER = {  # layers, hidden, heads, ffn: the reports' tables of models
    "7B": (32, 4096, 32, 14336),
    "13B": (40, 5120, 40, 17920),
    "70B": (80, 8192, 64, 28672),
    "175B": (96, 12288, 96, 39680),
}
_KORTHIKANTI = {  # layers, hidden, heads, micro-batch: arXiv 2205.05198, table 3
    "22B": (48, 6144, 64, 4),
    "175B": (96, 12288, 96, 1),
    "530B": (105, 20480, 128, 1),
    "1T": (128, 25600, 160, 1),
}


@dataclass(frozen=True)
class Run:
    """A measured run: what it was, and the arguments of `estimate` that describe it.

    group: runs of one model, which are left out of a fit together. seconds: of an iteration.
    """

    table: str
    name: str
    group: str
    seconds: float
    arguments: tuple
    options: tuple  # (name, value) pairs

    def estimate(self, efficiencies=FITTED):
        """The Estimate of the run."""
        return estimate(*self.arguments, efficiencies=efficiencies, **dict(self.options))

    def error(self, efficiencies=FITTED):
        """Estimated over measured seconds, less 1."""
        return self.estimate(efficiencies).seconds / self.seconds - 1


@cache
def runs(table):
    """Return the Runs of a published table.

    >>> [run.name for run in runs("iteration-time")][:2]
    ['22B, full recompute', '22B, selective and sequence parallel']
    """
    return tuple(_READERS[table]())


def all_runs(tables):
    """Return the Runs of several tables."""
    return [run for table in tables for run in runs(table)]


def _iteration_time():
    where = cluster("hgx-a100")
    for row in published_table("iteration-time").rows:
        layers, hidden, heads, b = _KORTHIKANTI[row["model"]]
        config = ModelConfig(layers=layers, hidden=hidden, heads=heads, vocab=51200, positions=2048)
        degrees = {"tp": row["tensor"], "pp": row["pipeline"], "chunks": row["chunks"]}
        for words, column, how in (
            ("full recompute", "full_recompute_s", {"recompute": "full"}),
            (
                "selective and sequence parallel",
                "sequence_parallel_selective_s",
                {"recompute": "selective", "sequence_parallel": True},
            ),
        ):
            layout = Layout(micro_batch=b, **degrees, **how)
            yield Run(
                "iteration-time",
                f"{row['model']}, {words}",
                row["model"],
                row[column],
                (config, _gpus(where, row["n_gpus"]), layout, 2048, row["global_batch"]),
                _MEGATRON,
            )


def _weak_scaling():
    chunk_layers = {
        row["params_billion"]: row["layers_per_virtual_stage"]
        for row in published_table("weak-scaling-virtual-stages").rows
    }
    same = {529.6: "530B", 1008.0: "1T"}  # the models of iteration-time
    for row in published_table("weak-scaling").rows:
        params, layers, hidden, p = (
            row["params_billion"],
            row["layers"],
            row["hidden"],
            row["pipeline"],
        )
        config = ModelConfig(
            layers=layers, hidden=hidden, heads=row["heads"], vocab=51200, positions=2048
        )
        layout = Layout(
            dp=row["n_gpus"] // (row["tensor"] * p),
            tp=row["tensor"],
            pp=p,
            chunks=layers // p // chunk_layers.get(params, layers // p),
            micro_batch=row["micro_batch"],
            recompute="full",
        )
        # The paper's FLOP of an iteration, its recomputation included (eq. 3).
        flop = 96 * row["global_batch"] * 2048 * layers * hidden**2
        flop *= 1 + 2048 / (6 * hidden) + 51200 / (16 * layers * hidden)
        yield Run(
            "weak-scaling",
            f"{params}B",
            same.get(params, f"{params}B"),
            flop / (row["n_gpus"] * row["tflop_per_s_per_gpu"] * 1e12),
            (config, _gpus(cluster("hgx-a100"), row["n_gpus"]), layout, 2048, row["global_batch"]),
            _MEGATRON,
        )


def _fsdp2():
    hgx = cluster("hgx-h100")
    # torchtitan's notes: HBM2e at 2.4 TB/s, and a power limit of 500 W, which no sheet has.
    card = replace(hgx.gpu, name="h100-96", memory_bandwidth_bytes_per_s=2.4e12)
    for row in published_table("fsdp2-llama-3-8b").rows:
        n, compiled = row["n_gpus"], row["compiled"]
        layout = Layout(dp=n, zero=3, micro_batch=2, recompute="per-op")
        yield Run(
            "fsdp2-llama-3-8b",
            f"8B on {n} GPUs" + (", compiled" if compiled else ""),
            "8B",
            2 * 8192 / row["tokens_per_s_per_gpu"],
            (model("llama-3-8b"), _gpus(replace(hgx, gpu=card), n), layout, 8192, 2 * n),
            (("recipe", "autocast"), ("fused", compiled)),
        )


def _megatron_runs():
    config = ModelConfig(
        layers=32,
        hidden=4096,
        heads=32,
        kv_heads=8,
        vocab=131584,  # 131073, padded as Megatron does, to a multiple of 128 x 4
        positions=8192,
        tied=False,
    )
    clusters = {"A100": cluster("hgx-a100"), "H100": cluster("hgx-h100")}
    for row in published_table("megatron-peak-memory").rows:
        p, t = row["pipeline"], row["tensor"]
        layout = Layout(
            dp=2, tp=t, pp=p, zero=1, micro_batch=row["micro_batch"], chunks=8 if p > 1 else 1
        )
        yield Run(
            "megatron-peak-memory",
            f"7B on 8 {row['gpu']}, tp {t}, pp {p}",
            "7B",
            row["median_s"],
            (config, clusters[row["gpu"]], layout, 8192, 8),
            (("recipe", "fp32-gradients"), ("dropout", True)),
        )


def _torchtitan():
    for row in published_table("torchtitan-a100").rows:
        b = row["micro_batch"]
        layout = Layout(dp=64, zero=3, micro_batch=b, recompute=row["recompute"])
        yield Run(
            "torchtitan-a100",
            f"{row['model']}, {row['recompute']}, b {b}",
            row["model"],
            b * row["sequence"] / row["tokens_per_s_per_gpu"],
            (
                model(row["model"]),
                _gpus(cluster("hgx-a100"), 64),
                layout,
                row["sequence"],
                64 * b,
            ),
            (("recipe", "autocast"), ("fused", False)),
        )


def _mpt(table, where, card=None):
    where = replace(where, gpu=card) if card else where
    for row in published_table(table).rows:
        layers, hidden, heads = _MPT_SHAPES[row["model"]]
        n, s = row["n_gpus"], row["sequence"]
        config = ModelConfig(layers=layers, hidden=hidden, heads=heads, vocab=50368, positions=s)
        recompute = "full" if row["recompute"] else "none"
        layout = Layout(dp=n, zero=3, micro_batch=row["micro_batch"], recompute=recompute)
        batch = row["micro_batch"] * row["accumulation"]
        yield Run(
            table,
            f"{row['model']}, s {s}, {n} GPUs",
            row["model"],
            batch * s / row["tokens_per_s_per_gpu"],
            (config, _gpus(where, n), layout, s, n * batch),
            (("fused", False),),
        )


def _kempner():
    node = replace(cluster("hgx-h200"), gpus_per_node=4)
    for row in published_table("kempner-h200").rows:
        layers, hidden, heads, ffn = _KEMPNER[row["model"]]
        config = ModelConfig(
            layers=layers,
            hidden=hidden,
            heads=heads,
            kv_heads=8,
            ffn=ffn,
            vocab=128_256,
            gated=True,
            norm="rms",
            biases=(),
            tied=False,
        )
        n, t, b = row["n_gpus"], row["tensor"], row["micro_batch"]
        layout = Layout(
            dp=n // t,
            tp=t,
            zero=3 if n > t else 0,
            micro_batch=b,
            recompute="full",
            sequence_parallel=t > 1,
        )
        yield Run(
            "kempner-h200",
            f"{row['model']}, {n} GPUs, tp {t}",
            row["model"],
            row["step_s"],
            (config, _gpus(node, n), layout, 4096, n // t * b * row["accumulation"]),
            (("recipe", "pure-bf16"), ("fused", row["compiled"])),
        )


def _gpus(node, n_gpus):
    """So many GPUs in nodes like this one, or in one smaller node."""
    per_node = min(n_gpus, node.gpus_per_node)
    return replace(node, gpus_per_node=per_node, n_nodes=n_gpus // per_node)


_MEGATRON = (("flash", False), ("dropout", True), ("overlap", False))  # as of 2021 and 2022
_READERS = {
    "iteration-time": _iteration_time,
    "weak-scaling": _weak_scaling,
    "fsdp2-llama-3-8b": _fsdp2,
    "megatron-peak-memory": _megatron_runs,
    "torchtitan-a100": _torchtitan,
    "mpt-a100-80": lambda: _mpt("mpt-a100-80", cluster("hgx-a100")),
    "mpt-a100-40": lambda: _mpt("mpt-a100-40", cluster("hgx-a100"), gpu("a100-40")),
    "mpt-h100-80": lambda: _mpt("mpt-h100-80", cluster("hgx-h100")),
    "kempner-h200": _kempner,
}
