"""Figures of the ledger that simulated ranks find on arrays: bytes sent, means, sums, losses."""

import numpy as np

from parlab.collectives import simulate
from parlab.data_parallel import (
    average_gradients,
    data_parallel_grad,
    token_recipes,
    token_weighted_mean,
)
from parlab.tensor_parallel.attention import pack_gate_up, packed_swiglu_mlp
from parlab.tensor_parallel.linear import gelu, row_parallel, row_shards
from parlab.tensor_parallel.step import columns_only_mlp_step, megatron_mlp_step
from parlab.tensor_parallel.vocabulary import vocabulary_parallel_cross_entropy


def bytes_sent(n_ranks, elements):
    """Most bytes that a rank sends in a ring all-reduce of float64."""
    return max(simulate.ring_all_reduce([np.zeros(elements)] * n_ranks)[1])


def bytes_sent_by_all(n_ranks, elements):
    return sum(simulate.ring_all_reduce([np.zeros(elements)] * n_ranks)[1])


def mean_of_ranks(gradients):
    return average_gradients([np.array([gradient]) for gradient in gradients])[0]


def token_mean(losses, tokens):
    return token_weighted_mean(losses, tokens)


def token_mean_by_recipe(losses, tokens, recipe):
    return token_recipes(losses, tokens)[recipe]


def unequal_shards_error(rows, n_ranks):
    """Median over 1000 draws of what the plain mean misses, over the largest component."""
    errors = []
    for seed in range(1000):
        rng = np.random.default_rng(seed)
        X, y = rng.standard_normal((rows, 5)), rng.standard_normal(rows)
        w = rng.random(5)
        full = X.T @ (X @ w - y) / rows
        off = data_parallel_grad(X, y, w, n_ranks, "ranks") - full
        errors.append(np.abs(off).max() / np.abs(full).max())
    return float(np.median(errors))


def sum_of_gelu(inputs):
    return float(sum(gelu(np.array(inputs, dtype=float))))


def row_parallel_output(n):
    """x = 1 2 3 4, W = 0 .. 11 as 4 x 3, and a bias of 100 200 300, on n ranks."""
    x, w = np.arange(1.0, 5.0), np.arange(12.0).reshape(4, 3)
    bias = np.array([100.0, 200.0, 300.0])
    return row_parallel(np.split(x, n), row_shards(w, n), bias).tolist()


def packed_swiglu(n):
    """x = 1, gate 1 2, up 3 4, down 1 1, on n ranks."""
    packed = pack_gate_up([[1, 2]], [[3, 4]])
    return packed_swiglu_mlp([1.0], packed, np.ones((2, 1)), n)[0]


def cross_entropy(logits, target, n):
    shards = np.split(np.array(logits, dtype=float), n)
    return float(vocabulary_parallel_cross_entropy(shards, target))


def columns_only_over_megatron_counted(phase):
    """Bytes sent by an MLP of 16 x 64 on 4 ranks, forward or backward."""
    rng = np.random.default_rng(0)
    x, dz = rng.normal(size=(2, 6, 16))
    a, b = rng.normal(size=(16, 64)), rng.normal(size=(64, 16))
    sent = [
        getattr(step(x, a, b, dz, 4), f"sent_{phase}")[0]
        for step in (columns_only_mlp_step, megatron_mlp_step)
    ]
    return sent[0] / sent[1]
