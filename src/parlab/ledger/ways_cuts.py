"""Bytes and seconds of expert and of context parallelism for the ledger."""

from dataclasses import replace

import numpy as np

from parlab import models
from parlab.context_parallel import ring_attention_step
from parlab.context_traffic import context_parallel_traffic
from parlab.context_work import causal_work, ring_hides_from
from parlab.expert_traffic import expert_parallel_traffic
from parlab.hardware import Link, gpu, link
from parlab.memory.step import training_memory
from parlab.models import ModelConfig
from parlab.tensor_traffic import compute_seconds

_H100 = gpu("h100-sxm")
# Small enough to run: 4 heads of queries and 2 of keys and values, of 8 features.
_SMALL = ModelConfig(layers=2, hidden=32, heads=4, kv_heads=2, vocab=32)


def expert_bytes(n_layers):
    """What a rank sends for Mixtral-8x7B with 4096 tokens on 8 ranks, there and back, both ways."""
    config = models.model("mixtral-8x7b")
    return expert_parallel_traffic(config, 1, sequence=4096, ep=8, n_layers=n_layers).bytes_per_rank


def expert_transfer_over_compute(ffn):
    """The same over 400 Gbit/s against the experts' compute on H100, by an expert's width."""
    config = replace(models.model("mixtral-8x7b"), ffn=ffn)
    wire = Link(0, link("infiniband-400g").bandwidth_bytes_per_s)
    sends = expert_parallel_traffic(config, 1, sequence=4096, ep=8, n_layers=32, link=wire).seconds
    flops = 3 * config.flops_per_token(4096).mlp * 4096
    return sends / compute_seconds(flops, 1, _H100, efficiency=0.4)


def bytes_that_one_copy_a_rank_saves(experts, active, ep):
    config = replace(models.model("mixtral-8x7b"), experts=experts, active_experts=active)
    copies, once = (
        expert_parallel_traffic(config, 1, sequence=4096, ep=ep, once_per_rank=flag).bytes_per_rank
        for flag in (False, True)
    )
    return 1 - once / copies


def ring_attention_bytes(phase, rows, sequence, n_layers):
    """What each of 4 ranks sends in float64."""
    traffic = context_parallel_traffic(
        _SMALL, rows, sequence=sequence, cp=4, n_layers=n_layers, element_bytes=8, grad_bytes=8
    )
    return traffic.only(phase=phase).bytes_per_rank


def ring_attention_bytes_counted(phase, rows, sequence, n_layers):
    rng = np.random.default_rng(0)
    q, k, v, dout = (rng.normal(size=(heads, sequence, 8)) for heads in (4, 2, 2, 4))
    step = ring_attention_step(q, k, v, dout, 4)
    return rows * n_layers * getattr(step, f"sent_{phase}")[0]


def context_bytes(model, sequence, cp, tp):
    """Of one layer and sequence, in bf16."""
    traffic = context_parallel_traffic(models.model(model), 1, sequence=sequence, cp=cp, tp=tp)
    return traffic.bytes_per_rank


def busiest_over_mean(sequence, cp, balanced):
    return causal_work(sequence, cp, balanced=balanced).imbalance


def tokens_that_hide_a_hop(model, wire):
    """Tokens a rank from which on an H100 at 40% of its peak computes longer than a hop takes."""
    return ring_hides_from(models.model(model), _H100, link(wire), efficiency=0.4)


def long_sequence_peak_bytes(cp):
    """Of Llama-3-8B with 131,072 tokens, on 8 cp cards, with tensor and sequence parallelism."""
    return training_memory(
        models.model("llama-3-8b"),
        1,
        sequence=131_072 // cp,
        n_gpus=cp,
        stage=1,
        tp=8,
        sequence_parallel=True,
    ).peak
