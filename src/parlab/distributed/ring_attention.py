"""Ring attention between real processes, as an operator that autograd can differentiate.

Shapes in comments: b rows of a batch, s positions, N ranks, m = s / N, a heads, k heads of keys and
values, g = a / k, d the size of a head. The ring is all ranks of the default process group.
"""

import torch
import torch.distributed as dist

from parlab.context_work import causal_pairs, context_pieces


def tokens_of_ranks(sequence, balanced):
    """The numbers of the tokens that each rank holds, one tensor per rank."""
    pieces = context_pieces(sequence, dist.get_world_size(), balanced=balanced)
    return [torch.cat([torch.arange(p.start, p.stop) for p in own]) for own in pieces]


class RingAttention(torch.autograd.Function):
    """Causal attention of this rank's queries (b, a, m, d) over the keys and values of all ranks.

    It takes this rank's keys and values, (b, k, m, d) each, and the same of every rank goes round.
    Forward sends to rank + 1 and keeps, beside the queries and the output, the block that came
    last; backward starts from that and goes round the other way, so that each block comes home
    last, and with it the sum of its gradients. The same as `parlab.context_parallel`.
    """

    @staticmethod
    def forward(ctx, q, k, v, balanced):
        ring = _Ring(q.shape[2], balanced)
        q = _grouped(q, k.shape[1])
        block, state = torch.stack([k, v]), None  # (2, b, k, m, d): one message
        for step in range(ring.n):
            owner = (ring.rank - step) % ring.n
            hop = ring.start(block, +1) if step + 1 < ring.n else None
            if ring.sees(owner):
                keys, values = block.unsqueeze(3)
                state = _attend(state, ring.scores(q, keys, owner), values)
            if hop:
                block = hop.finish()
        largest, total, weighted = state
        out = weighted / total.unsqueeze(-1)  # (b, k, g, m, d)
        ctx.save_for_backward(q, block, out, largest + total.log())
        ctx.balanced = balanced
        return out.flatten(1, 2)

    @staticmethod
    def backward(ctx, gradient):
        q, block, out, log_sum_exp = ctx.saved_tensors
        ring = _Ring(q.shape[3], ctx.balanced)
        gradient = _grouped(gradient, q.shape[1])
        along = (gradient * out).sum(-1, keepdim=True)
        dq, sums, sums_hop = torch.zeros_like(q), None, None
        for step in range(ring.n):
            owner = (ring.rank + 1 + step) % ring.n
            hop = ring.start(block, -1) if step + 1 < ring.n else None
            found = torch.zeros_like(block)
            if ring.sees(owner):
                keys, values = block.unsqueeze(3)
                weights = (ring.scores(q, keys, owner) - log_sum_exp.unsqueeze(-1)).exp()
                dscores = weights * (gradient @ values.transpose(-1, -2) - along) * ring.scale(q)
                dq += dscores @ keys
                found[0] = (dscores.transpose(-1, -2) @ q).sum(2)
                found[1] = (weights.transpose(-1, -2) @ gradient).sum(2)
            # What the neighbour has summed arrives while this rank computes its own part.
            sums = found + sums_hop.finish() if sums_hop else found
            if hop:
                block, sums_hop = hop.finish(), ring.start(sums, -1)
        return dq.flatten(1, 2), *sums, None


class _Ring:
    """This rank's place among the ranks, and what its queries may see."""

    def __init__(self, m, balanced):
        self.rank, self.n = dist.get_rank(), dist.get_world_size()
        self.pieces = context_pieces(m * self.n, self.n, balanced=balanced)
        self.tokens = tokens_of_ranks(m * self.n, balanced)

    def sees(self, owner):
        return causal_pairs(self.pieces[self.rank], self.pieces[owner]) > 0

    def scores(self, q, keys, owner):
        """(b, k, g, m, m), -infinity where a key is later than the query."""
        later = self.tokens[self.rank].unsqueeze(1) < self.tokens[owner]
        scores = q @ keys.transpose(-1, -2) * self.scale(q)
        return scores.masked_fill(later.to(q.device), -torch.inf)

    @staticmethod
    def scale(q):
        return q.shape[-1] ** -0.5

    def start(self, tensor, direction):
        to, source = (self.rank + direction) % self.n, (self.rank - direction) % self.n
        return _Hop(tensor, to, source)


class _Hop:
    """A message to one neighbour and one from the other, under way."""

    def __init__(self, tensor, to, source):
        self.arriving = torch.empty_like(tensor)
        operations = [
            dist.P2POp(dist.isend, tensor, to),
            dist.P2POp(dist.irecv, self.arriving, source),
        ]
        self.works = dist.batch_isend_irecv(operations)

    def finish(self):
        for work in self.works:
            work.wait()
        return self.arriving


def _attend(state, scores, values):
    """The online softmax of `parlab.context_parallel.attend_block`."""
    largest = scores.amax(-1)
    if state is not None:
        largest = largest.maximum(state[0])
    # A row that has seen no key yet has no maximum; infinity minus infinity would be NaN.
    shift = largest.where(largest > -torch.inf, 0)
    weights = (scores - shift.unsqueeze(-1)).exp()
    total, weighted = weights.sum(-1), weights @ values
    if state is not None:
        shrunk = (state[0] - shift).exp()
        total = total + shrunk * state[1]
        weighted = weighted + shrunk.unsqueeze(-1) * state[2]
    return largest, total, weighted


def _grouped(x, kv_heads):
    """(b, a, m, d) as (b, k, g, m, d)."""
    return x.unflatten(1, (kv_heads, -1))
