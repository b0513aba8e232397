"""Ring attention on n simulated ranks: keys and values travel, queries stay, no rank has all keys.

Shapes in comments: s positions, a heads, k heads of keys and values, g = a / k, d the size of a
head, m = s / n. Inputs are never changed; types and overflow as in `tensor_parallel.linear`.
"""

from typing import NamedTuple

import numpy as np

from parlab.context_work import causal_pairs, context_pieces
from parlab.tensor_parallel.linear import as_floats, require_finite
from parlab.units import require_bool, require_int


class Attended(NamedTuple):
    """What a row of queries has seen so far: enough to go on with any further block of keys.

    largest: the largest score, -infinity before the first key. total: sum of exp(score - largest).
    weighted: sum of exp(score - largest) value. Shapes (...), (...) and (..., d).
    """

    largest: np.ndarray
    total: np.ndarray
    weighted: np.ndarray


def attend_block(state, scores, values):
    """Return the state after one more block of keys: the online softmax.

    With M the larger of the old and the new maximum, what is there shrinks by exp(old - M), and the
    block adds exp(score - M): no score is needed twice, and no exponent is above 0. Milakov and
    Gimelshein (arXiv 1805.02867), section 3.

    state: an Attended, or None before the first block. scores: (..., m, keys), -infinity where a
    query may not see a key; a row may be all -infinity. values: (..., keys, d).

    >>> one = attend_block(None, np.array([[0.0]]), np.array([[5.0]]))
    >>> two = attend_block(one, np.array([[1000.0, -np.inf]]), np.array([[7.0], [9.0]]))
    >>> output, log_sum_exp = finish_attention(two)  # of the scores 0, 1000: all weight on the last
    >>> output.tolist(), log_sum_exp.tolist()
    ([[7.0]], [1000.0])
    """
    largest = scores.max(axis=-1, initial=-np.inf)
    if state is not None:
        largest = np.maximum(largest, state.largest)
    # A row that has seen no key yet has no maximum; infinity minus infinity would be NaN.
    shift = np.where(largest > -np.inf, largest, 0)
    weights = np.exp(scores - shift[..., None])
    total, weighted = weights.sum(axis=-1), weights @ values
    if state is not None:
        shrunk = np.exp(state.largest - shift)
        total = total + shrunk * state.total
        weighted = weighted + shrunk[..., None] * state.weighted
    return Attended(largest, total, weighted)


def finish_attention(state):
    """Return the output (..., d) and the log of the sum of exponentials of all scores (...).

    The latter is all that backward needs to make any block's weights again: exp(score - it).

    Raises ValueError if a row has seen no key: no weights exist.
    """
    if (state.total == 0).any():
        raise ValueError("every query must see a key, got a row whose scores are all -infinity")
    return state.weighted / state.total[..., None], state.largest + np.log(state.total)


def join_pieces(results, *, balanced=True, axis=-2):
    """Put the ranks' rows in the order of the sequence again; the inverse of `context_pieces`.

    >>> join_pieces([np.array([0, 3]), np.array([1, 2])], axis=0).tolist()
    [0, 1, 2, 3]
    """
    if not require_bool("balanced", balanced):
        return np.concatenate(results, axis=axis)
    halves = [np.split(result, 2, axis=axis) for result in results]
    first, second = zip(*halves, strict=True)
    return np.concatenate([*first, *reversed(second)], axis=axis)


def ring_attention(q, k, v, n, *, causal=True, balanced=True):
    """Return attention's output on every rank, and the bytes that each rank sent.

    Rank r computes for its own queries. In every step but the last it hands the keys and values
    that it holds to rank r + 1 and gets those of rank r - 1, so after n steps every query has met
    every key (Liu et al., arXiv 2310.01889). A block whose keys are all later is passed on unseen.

    q: (..., a, s, d). k, v: (..., k, s, d); query head i uses key-value head i // g. n: ranks.
    causal: a query sees its own and earlier keys. balanced: which tokens a rank holds, as in
    `context_pieces`.

    Returns (results, sent): results[r] is (..., a, m, d), the rows in the order of the rank's
    tokens (`join_pieces` puts them together); sent[r] is an int.

    >>> q, k, v = np.random.default_rng(0).normal(size=(3, 2, 8, 4))  # 2 heads, 8 tokens
    >>> results, sent = ring_attention(q, k, v, 4)
    >>> join_pieces(results).shape, sent  # 3 hops of 2 x (2, 2, 4) doubles
    ((2, 8, 4), [768, 768, 768, 768])

    Raises ValueError for shapes that do not fit and tokens that can't be dealt out equally.
    """
    ring = _Ring(q, k, v, n, causal, balanced)
    ring.forward()
    return ring.outputs, ring.sent


class RingStep(NamedTuple):
    """Forward and backward on n ranks; sent_*[r] are the bytes that rank r sent.

    output, dq, dk, dv: put together from the ranks' rows, which stay where they are.
    """

    output: np.ndarray
    dq: np.ndarray
    dk: np.ndarray
    dv: np.ndarray
    sent_forward: list
    sent_backward: list


def ring_attention_step(q, k, v, dout, n, *, causal=True, balanced=True):
    """Run `ring_attention`, and its backward from dout, the gradient of the output (..., a, s, d).

    Backward goes round the other way, from the block on which forward ended, so that each block
    comes home last; the sum of its gradients follows it, one hop behind, and comes home with it.
    Other arguments as in `ring_attention`.

    >>> q, k, v, dout = np.random.default_rng(0).normal(size=(4, 2, 8, 4))
    >>> step = ring_attention_step(q, k, v, dout, 4)
    >>> step.sent_forward[0], step.sent_backward[0]
    (768, 1536)
    """
    ring = _Ring(q, k, v, n, causal, balanced)
    ring.forward()
    output, sent_forward = join_pieces(ring.outputs, balanced=balanced), ring.sent
    dout = as_floats("dout", dout).astype(output.dtype, copy=False)
    if dout.shape != output.shape:
        raise ValueError(f"dout must have the output's shape {output.shape}, got {dout.shape}")
    gradients = ring.backward(dout)
    joined = [require_finite(join_pieces(g, balanced=balanced), *ring.inputs) for g in gradients]
    return RingStep(output, *joined, sent_forward, ring.sent)


class _Ring:
    """n ranks, of which rank r holds queries[r], and at any moment the block blocks[r]."""

    def __init__(self, q, k, v, n, causal, balanced):
        q, k, v = (as_floats(*pair) for pair in (("q", q), ("k", k), ("v", v)))
        self.n = require_int("n", n, minimum=1)
        self.causal = require_bool("causal", causal)
        self.group = _heads_in_a_group(q, k, v)
        dtype = np.result_type(q, k, v)
        self.inputs = [array.astype(dtype, copy=False) for array in (q, k, v)]
        self.pieces = context_pieces(q.shape[-2], self.n, balanced=balanced)
        self.tokens = [
            np.concatenate([np.arange(p.start, p.stop) for p in own]) for own in self.pieces
        ]
        queries, keys, values = ([x[..., own, :] for own in self.tokens] for x in self.inputs)
        self.queries = [self._grouped(x) for x in queries]
        self.scale = q.shape[-1] ** -0.5
        # A block and the rank whose tokens it has.
        self.held = [(rank, (keys[rank], values[rank])) for rank in range(self.n)]
        self.sent = [0] * self.n

    @np.errstate(
        over="ignore", invalid="ignore"
    )  # `require_finite` refuses what they would warn of
    def forward(self):
        states = [None] * self.n
        for step in range(self.n):
            for rank, (owner, (keys, values)) in enumerate(self.held):
                if self._sees(rank, owner):
                    scores = self._scores(rank, owner, keys)
                    states[rank] = attend_block(states[rank], scores, values[..., None, :, :])
            if step + 1 < self.n:
                self.held = self._pass(self.held, +1)
        finished = [finish_attention(state) for state in states]
        self.log_sum_exp = [log_sum_exp for _, log_sum_exp in finished]
        self.outputs = [require_finite(self._heads(out), *self.inputs) for out, _ in finished]

    @np.errstate(over="ignore", invalid="ignore")
    def backward(self, dout):
        self.sent = [0] * self.n
        dout = [self._grouped(dout[..., own, :]) for own in self.tokens]  # (..., k, g, m, d)
        # What the gradient of every score in a row loses, whatever its block.
        along = [
            (d * self._grouped(out)).sum(-1, keepdims=True)
            for d, out in zip(dout, self.outputs, strict=True)
        ]
        dq = [np.zeros_like(queries) for queries in self.queries]
        sums = [(owner, map(np.zeros_like, block)) for owner, block in self.held]
        for step in range(self.n):
            if step > 0:
                sums = self._pass(sums, -1)
            for rank, (owner, block) in enumerate(self.held):
                found = sums[rank][1]
                if self._sees(rank, owner):
                    dqueries, *mine = self._block_gradients(rank, owner, *block, dout, along)
                    dq[rank] += dqueries
                    found = map(np.add, found, mine)
                sums[rank] = owner, tuple(found)
            if step + 1 < self.n:
                self.held = self._pass(self.held, -1)
        dk, dv = zip(*(block for _, block in sums), strict=True)
        return [self._heads(x) for x in dq], dk, dv

    def _block_gradients(self, rank, owner, keys, values, dout, along):
        """What a rank's queries give to their own gradient and to that of a block's keys, values.

        Dao et al. (arXiv 2205.14135), appendix B: with the weights P = exp(scores - log-sum-exp)
        made again, dV = P' dO, dS = P (dO V' - sum of dO O in the row), dQ = dS K, dK = dS' Q.
        """
        scores = self._scores(rank, owner, keys)
        weights = np.exp(scores - self.log_sum_exp[rank][..., None])
        keys, values = keys[..., None, :, :], values[..., None, :, :]
        dweights = dout[rank] @ np.swapaxes(values, -1, -2)
        dscores = weights * (dweights - along[rank]) * self.scale
        # A head of keys and values gets the sum over the queries' heads that share it.
        dkeys = (np.swapaxes(dscores, -1, -2) @ self.queries[rank]).sum(-3)
        dvalues = (np.swapaxes(weights, -1, -2) @ dout[rank]).sum(-3)
        return dscores @ keys, dkeys, dvalues

    def _pass(self, blocks, direction):
        """Every rank sends its block to the neighbour in a direction; returns what each gets."""
        for rank, (_, block) in enumerate(blocks):
            self.sent[rank] += sum(array.nbytes for array in block)
        return [blocks[(rank - direction) % self.n] for rank in range(self.n)]

    def _sees(self, rank, owner):
        return not self.causal or causal_pairs(self.pieces[rank], self.pieces[owner]) > 0

    def _scores(self, rank, owner, keys):
        scores = self.queries[rank] @ np.swapaxes(keys, -1, -2)[..., None, :, :] * self.scale
        if not self.causal:
            return scores
        later = self.tokens[rank][:, None] < self.tokens[owner]
        return np.where(later, -np.inf, scores)

    def _grouped(self, x):
        """(..., a, m, d) as (..., k, g, m, d)."""
        return x.reshape(*x.shape[:-3], -1, self.group, *x.shape[-2:])

    def _heads(self, x):
        """(..., k, g, m, d) as (..., a, m, d)."""
        return x.reshape(*x.shape[:-4], -1, *x.shape[-2:])


def _heads_in_a_group(q, k, v):
    good = q.ndim >= 3 and k.ndim == q.ndim and k.shape == v.shape and 0 not in (*q.shape, *k.shape)
    if good:
        outer, heads, rows = q.shape[:-3], q.shape[-3], q.shape[-2:]
        good = k.shape == (*outer, k.shape[-3], *rows) and heads % k.shape[-3] == 0
    if not good:
        raise ValueError(
            "q, k and v must be (..., a, s, d) and twice (..., k, s, d), none empty, where k "
            f"divides a, got {q.shape}, {k.shape}, {v.shape}"
        )
    return q.shape[-3] // k.shape[-3]
