"""Measured peaks of memory beside `training_memory`, in which nothing is fitted."""

from parlab import models
from parlab.memory.step import training_memory
from parlab.models import ModelConfig
from parlab.published import published_table


def peaks():
    """Yield (table, name, measured bytes, our bytes) of every published peak.

    >>> table, name, measured, ours = next(peaks())
    >>> name, round(ours / measured - 1, 3)
    ('7B on 8 A100, tp 1, pp 4', -0.006)
    """
    for row in published_table("megatron-peak-memory").rows:
        sizes = (row["tensor"], row["pipeline"], row["micro_batch"])
        name = f"7B on 8 {row['gpu']}, tp {row['tensor']}, pp {row['pipeline']}"
        ours = megatron_bytes(*sizes, "peak")
        yield "megatron-peak-memory", name, row["max_allocated_bytes"], ours
    for row in published_table("fsdp2-llama-3-8b").rows:
        name = f"8B on {row['n_gpus']} GPUs" + (", compiled" if row["compiled"] else "")
        ours = torchtitan_peak_bytes(row["n_gpus"], row["compiled"])
        yield "fsdp2-llama-3-8b", name, row["peak_gib"] * 2**30, ours


def megatron_bytes(tensor, pipeline, micro_batch, moment):
    """The 7B-class runs of Megatron-LM: configuration, its defaults, and what is inferred.

    The conditions of the published table "megatron-peak-memory" tell which is which. Tensors have
    the same sizes on every GPU.
    """
    vocab = -(-131073 // (128 * tensor)) * 128 * tensor
    memory = training_memory(
        ModelConfig(
            layers=32, hidden=4096, heads=32, kv_heads=8, vocab=vocab, positions=8192, tied=False
        ),
        micro_batch,
        sequence=8192,
        tp=tensor,
        pipeline=pipeline,
        chunks=8 if pipeline > 1 else 1,
        pipeline_rank=pipeline - 1,
        n_gpus=2,
        stage=1,
        recipe="fp32-gradients",
        keep_gradients=True,
        dropout=True,
        flash=True,
        loss="megatron",
        keep_logits=False,
        foreach=False,
    )
    return memory.peak if moment == "peak" else memory.at(moment)


def torchtitan_peak_bytes(n_gpus, compiled):
    """Llama-3-8B under FSDP2 as torchtitan runs it; its gauge is reserved memory."""
    llama = models.model("llama-3-8b")
    peak = training_memory(
        llama,
        2,
        sequence=8192,
        n_gpus=n_gpus,
        stage=3,
        recipe="autocast",
        recompute="per-op",
        loss="torch",
        keep_logits=False,
        keep_gradients=False,
        reserved=True,
    ).peak
    last_block = 2 * llama.layer_params  # the program does not reshard it after forward
    unread = 2 * 2 * 8192 * llama.hidden * llama.layers  # a compiled block does not keep it
    return peak + last_block - unread * compiled
