"""A layer of experts forward and backward: whole, and cut over ep simulated ranks.

Every expert is an MLP without biases, gelu(x A_i) B_i. T is the tokens, h their size, f the width
inside an expert, E the experts, e how many of them a token visits. All is computed in float64.
"""

from typing import NamedTuple

import numpy as np

from parlab.expert_parallel.exchange import all_to_all
from parlab.expert_parallel.load import rank_counts
from parlab.expert_parallel.routing import expert_counts, require_kept, route, route_backward
from parlab.tensor_parallel.linear import as_floats, gelu, gelu_gradient
from parlab.units import require_int


class LayerStep(NamedTuple):
    """Output and gradients: of tokens (T, h), of the router (h, E), and of all or some experts."""

    output: np.ndarray
    dx: np.ndarray
    d_router: np.ndarray
    d_first: np.ndarray
    d_second: np.ndarray


def expert_layer(x, router, first, second, dz, active, *, renormalise=True, kept=None):
    """Run the layer on one device: sum over a token's experts of weight times gelu(x A_i) B_i.

    It sends every token through every expert and weighs by 0 those that it did not choose: wasteful
    and plain, as a reference should be.

    x: (T, h). router: (h, E). first, second: A (E, h, f) and B (E, f, h). dz: gradient of the
        output, (T, h). active: e. renormalise: as in `route`.
    kept: copies that are not dropped, (T, e) of bools as from `within_capacity`; None keeps all.
    Returns a LayerStep with the gradients of all experts.

    >>> eye, zero = np.eye(2), np.zeros((2, 2))
    >>> step = expert_layer([[3.0, 0.0]], eye, [eye, zero], [eye, eye], [[1.0, 0.0]], active=1)
    >>> step.output.round(2).tolist()  # gelu(3) by expert 0
    [[3.0, 0.0]]
    """
    x, router, first, second, dz = _layer_arrays(x, router, first, second, dz)
    routing = route(x @ router, active, renormalise=renormalise)
    kept = require_kept(kept, routing.chosen)
    weights = np.zeros_like(routing.probabilities)  # (T, E)
    np.put_along_axis(weights, routing.chosen, routing.weights * kept, axis=1)

    inner = np.einsum("th,ehf->etf", x, first)
    outputs = gelu(inner) @ second  # (E, T, h)
    output = np.einsum("te,eth->th", weights, outputs)

    d_outputs = np.einsum("te,th->eth", weights, dz)
    d_second = gelu(inner).swapaxes(1, 2) @ d_outputs
    d_inner = d_outputs @ second.swapaxes(1, 2) * gelu_gradient(inner)
    d_first = x.T @ d_inner
    d_weights = np.einsum("th,eth->te", dz, outputs)
    d_weights = np.take_along_axis(d_weights, routing.chosen, axis=1) * kept
    d_logits = route_backward(routing, d_weights)
    dx = np.einsum("etf,ehf->th", d_inner, first) + d_logits @ router.T
    return LayerStep(output, dx, x.T @ d_logits, d_first, d_second)


def expert_parallel_layer(xs, router, first, second, dzs, active, *, renormalise=True, kept=None):
    """Run the layer on ep ranks, each with its own tokens and E / ep of the experts.

    Four all-to-alls: copies of tokens to their experts, outputs back; gradients of outputs to the
    experts, gradients of tokens back. A rank's parcels hold its copies in the order of experts.

    xs, dzs: one (T_r, h) a rank; T_r may differ. router: the same on every rank. first, second: of
        all experts, of which rank r takes its block. kept: None, or one (T_r, e) a rank.
    Returns (results, sent): results[r] is a LayerStep with the output and dx of rank r's tokens,
    the gradients of its own experts, which are complete, and the router's gradient from its own
    tokens, which the ranks have yet to add up; sent[r] is the bytes that rank r sent.

    >>> x, eye = np.eye(2), np.eye(2)
    >>> experts = np.stack([eye, eye])
    >>> results, sent = expert_parallel_layer([x, x], eye, experts, experts, [x, x], active=1)
    >>> sent  # of 2 tokens each sends one away and gets one: 2 x 2 doubles, forward and backward
    [64, 64]
    """
    ranks = [_layer_arrays(x, router, first, second, dz) for x, dz in zip(xs, dzs, strict=True)]
    ep = require_int("number of ranks in xs", len(ranks), minimum=1)
    experts = ranks[0][1].shape[1]
    if experts % ep:
        raise ValueError(f"xs must have as many ranks as divide the {experts} experts, got {ep}")
    kept = [None] * ep if kept is None else kept
    homes = [
        _Home(*rank, active, renormalise, keep, ep) for rank, keep in zip(ranks, kept, strict=True)
    ]
    counts = np.array([home.counts for home in homes])  # (ep, E): copies of a rank for an expert
    blocks = zip(*(np.split(array, ep) for array in ranks[0][2:4]), strict=True)
    hosts = [
        _Host(*block, part)
        for block, part in zip(blocks, np.split(counts, ep, axis=1), strict=True)
    ]

    arrived, sent_a = all_to_all([home.copies() for home in homes])
    parcels = [host.forward(rows) for host, rows in zip(hosts, arrived, strict=True)]
    returned, sent_b = all_to_all(parcels)
    outputs = [home.combine(rows) for home, rows in zip(homes, returned, strict=True)]

    arrived, sent_c = all_to_all([home.gradients() for home in homes])
    parcels = [host.backward(rows) for host, rows in zip(hosts, arrived, strict=True)]
    returned, sent_d = all_to_all(parcels)
    of_tokens = [home.backward(rows) for home, rows in zip(homes, returned, strict=True)]

    results = [
        LayerStep(output, *gradients, host.d_first, host.d_second)
        for output, gradients, host in zip(outputs, of_tokens, hosts, strict=True)
    ]
    return results, list(map(sum, zip(sent_a, sent_b, sent_c, sent_d, strict=True)))


class _Home:
    """A rank as the home of its tokens: it sends copies away and puts together what returns."""

    def __init__(self, x, router, first, second, dz, active, renormalise, kept, ep):
        self.x, self.router, self.dz = x, router, dz
        self.routing = route(x @ router, active, renormalise=renormalise)
        chosen = self.routing.chosen
        kept = require_kept(kept, chosen)
        # Of every copy, in the order of experts: its token and the place of its expert in `chosen`.
        token, place = np.nonzero(kept)
        order = np.argsort(chosen[token, place], kind="stable")
        self.token, self.place = token[order], place[order]
        self.counts = expert_counts(chosen, router.shape[1], kept)
        self.ends = np.cumsum(rank_counts(self.counts, ep))[:-1]

    def copies(self):
        return np.split(self.x[self.token], self.ends)

    def combine(self, returned):
        self.outputs = np.zeros((*self.routing.chosen.shape, self.x.shape[1]))  # (T, e, h)
        self.outputs[self.token, self.place] = np.concatenate(returned)
        return np.einsum("te,teh->th", self.routing.weights, self.outputs)

    def gradients(self):
        weights = self.routing.weights[self.token, self.place]
        return np.split(weights[:, None] * self.dz[self.token], self.ends)

    def backward(self, returned):
        d_weights = np.einsum("th,teh->te", self.dz, self.outputs)
        d_logits = route_backward(self.routing, d_weights)
        dx = d_logits @ self.router.T
        np.add.at(dx, self.token, np.concatenate(returned))
        return dx, self.x.T @ d_logits


class _Host:
    """A rank as the host of its experts; counts[src]: how many rows of src each of them gets."""

    def __init__(self, first, second, counts):
        self.first, self.second = first, second
        self.expert = np.concatenate([np.repeat(np.arange(len(first)), row) for row in counts])
        self.ends = np.cumsum(counts.sum(axis=1))[:-1]
        self.d_first, self.d_second = np.zeros_like(first), np.zeros_like(second)

    def forward(self, arrived):
        self.rows = np.concatenate(arrived)
        outputs = np.zeros_like(self.rows)
        for i, (a, b) in enumerate(zip(self.first, self.second, strict=True)):
            outputs[self.expert == i] = gelu(self.rows[self.expert == i] @ a) @ b
        return np.split(outputs, self.ends)

    def backward(self, arrived):
        gradients = np.concatenate(arrived)
        d_rows = np.zeros_like(self.rows)
        for i, (a, b) in enumerate(zip(self.first, self.second, strict=True)):
            mine = self.expert == i
            inner = self.rows[mine] @ a
            d_inner = gradients[mine] @ b.T * gelu_gradient(inner)
            self.d_second[i] = gelu(inner).T @ gradients[mine]
            self.d_first[i] = self.rows[mine].T @ d_inner
            d_rows[mine] = d_inner @ a.T
        return np.split(d_rows, self.ends)


def _layer_arrays(x, router, first, second, dz):
    arrays = {"x": x, "router": router, "first": first, "second": second, "dz": dz}
    x, router, first, second, dz = (
        as_floats(name, array).astype(np.float64) for name, array in arrays.items()
    )
    fits = (
        x.ndim == router.ndim == 2
        and first.ndim == 3
        and router.shape == (x.shape[1], len(first))
        and first.shape[1] == x.shape[1]
        and second.shape == (len(first), first.shape[2], x.shape[1])
        and dz.shape == x.shape
    )
    if not fits:
        raise ValueError(
            "x, router, first, second and dz must be (T, h), (h, E), (E, h, f), (E, f, h) and "
            f"(T, h), got {x.shape}, {router.shape}, {first.shape}, {second.shape} and {dz.shape}"
        )
    return x, router, first, second, dz
