"""Expert parallelism on real ranks: a layer of experts cut over groups of them, and its gradients.

N ranks see different tokens. Groups of ep consecutive ranks hold all experts between them; the
N / ep ranks with the same experts, one of each group, are an expert-data-parallel group.

Shapes in comments: T tokens of a rank, h hidden size, f width inside an expert, E experts, e how
many of them a token visits.
"""

from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from parlab.distributed.counting import CollectiveCounter
from parlab.distributed.ring import all_reduce
from parlab.distributed.sharding import require_shares
from parlab.units import require_choice, require_int

gelu = partial(F.gelu, approximate="tanh")
RECIPES = ("right", "mean over the group", "mean over all ranks", "none")


class ExpertLayer(nn.Module):
    """All E experts on one device; each token's output is the weighted sum of its e best.

    Every token goes through every expert, and those that it did not choose weigh 0: wasteful and
    plain, as a reference should be.
    """

    def __init__(self, hidden, ffn, experts, active):
        super().__init__()
        self.active = require_int("active", active, minimum=1, maximum=experts)
        self.router = nn.Parameter(torch.empty(experts, hidden))
        self.up = nn.Parameter(torch.empty(experts, ffn, hidden))
        self.down = nn.Parameter(torch.empty(experts, hidden, ffn))

    def forward(self, x):  # (T, h)
        weights, chosen = route(x, self.router, self.active)
        of_all = x.new_zeros(len(x), len(self.router)).scatter(1, chosen, weights)  # (T, E)
        inner = gelu(torch.einsum("th,efh->etf", x, self.up))
        return torch.einsum("te,etf,ehf->th", of_all, inner, self.down)


def route(x, router, active):
    """Weights, which sum to 1, and numbers of the e most probable experts of a token, (T, e)."""
    weights, chosen = F.linear(x, router).softmax(-1).topk(active)
    return weights / weights.sum(-1, keepdim=True), chosen


@dataclass
class ExpertGroups:
    """This rank's two groups, and the bytes that it sent to others by (phase, what)."""

    ep: int
    expert: dist.ProcessGroup
    expert_data: dist.ProcessGroup
    sent: dict = field(default_factory=dict)

    @classmethod
    def of(cls, ep):
        """Make the groups; every rank has to call this. ValueError unless ep divides the ranks."""
        n, me = dist.get_world_size(), dist.get_rank()
        ep = require_int("ep", ep, minimum=1)
        require_shares("world size", n, ep, "every group holds all experts")
        experts = [list(range(start, start + ep)) for start in range(0, n, ep)]
        replicas = [list(range(place, n, ep)) for place in range(ep)]
        mine = []
        for kind in (experts, replicas):
            made = [dist.new_group(ranks) for ranks in kind]
            mine.append(next(group for group, ranks in zip(made, kind, strict=True) if me in ranks))
        return cls(ep, *mine)

    def exchange(self, rows, give, take, phase, what):
        """All-to-all: give[d] rows to rank d of the expert group, take[s] rows from rank s."""
        out = rows.new_empty((sum(take), *rows.shape[1:]))
        dist.all_to_all_single(out, rows.contiguous(), take, give, group=self.expert)
        others = len(rows) - give[dist.get_rank(self.expert)]
        row_bytes = rows.element_size() * rows[:1].numel() if len(rows) else 0
        self.sent[phase, what] = self.sent.get((phase, what), 0) + others * row_bytes
        return out


class Exchange(torch.autograd.Function):
    """All-to-all of rows forward; backward the gradients go back the way that the rows came."""

    @staticmethod
    def forward(ctx, rows, give, take, groups, what):
        ctx.give, ctx.take, ctx.groups, ctx.what = give, take, groups, what
        return groups.exchange(rows, give, take, "forward", what)

    @staticmethod
    def backward(ctx, gradient):
        what = {"dispatch": "combine", "combine": "dispatch"}[ctx.what]
        back = ctx.groups.exchange(gradient, ctx.take, ctx.give, "backward", what)
        return back, None, None, None, None


class ParallelExpertLayer(nn.Module):
    """This rank's share of an `ExpertLayer`: the router, and E / ep of the experts.

    It takes and returns its own tokens. After the backward pass an expert's gradient is complete
    for the tokens of its group; `average_gradients` does the rest.
    """

    def __init__(self, whole, groups):
        super().__init__()
        self.active, self.groups = whole.active, groups
        require_shares("experts", len(whole.router), groups.ep, "ranks hold equally many")
        place = dist.get_rank(groups.expert)
        self.router = nn.Parameter(whole.router.detach().clone())
        for name in ("up", "down"):
            block = getattr(whole, name).detach().chunk(groups.ep)[place]
            setattr(self, name, nn.Parameter(block.clone()))

    def forward(self, x):  # (T, h)
        weights, chosen = route(x, self.router, self.active)
        self.chosen = chosen
        order = chosen.flatten().argsort(stable=True)  # copies in the order of experts
        give = chosen.flatten().bincount(minlength=len(self.router)).view(self.groups.ep, -1)
        ones = [1] * self.groups.ep
        take = self.groups.exchange(give, ones, ones, "forward", "counts")  # (ep, E / ep)
        sizes = give.sum(1).tolist(), take.sum(1).tolist()

        rows = Exchange.apply(x[order // self.active], *sizes, self.groups, "dispatch")
        rows = self._run_experts(rows, take)
        rows = Exchange.apply(rows, *reversed(sizes), self.groups, "combine")
        outputs = rows[order.argsort()].view(*chosen.shape, -1)  # (T, e, h)
        return (weights.unsqueeze(-1) * outputs).sum(1)

    def _run_experts(self, rows, take):
        mine = torch.arange(len(self.up), device=rows.device)
        expert = mine.repeat(len(take)).repeat_interleave(take.flatten())  # of each row
        order = expert.argsort(stable=True)
        parts = rows[order].split(take.sum(0).tolist())
        outputs = [
            F.linear(gelu(F.linear(part, up)), down)
            for part, up, down in zip(parts, self.up, self.down, strict=True)
        ]
        return torch.cat(outputs)[order.argsort()]


def average_gradients(layer, recipe="right"):
    """Make the gradients those of the mean over all N ranks of their losses.

    The router's, as that of any other parameter, is averaged over all ranks. An expert's is summed
    already over the ranks of its group, whose tokens came to it: so sum it over the expert-data
    group and divide by N, as Megatron Core and, since its PR 6546, DeepSpeed do. The other recipes
    treat experts differently, to show what goes wrong:

    "mean over the group" : divide by N / ep instead, the ranks that were summed: ep times too large.
    "mean over all ranks" : as any other parameter; ranks hold different experts.
    "none" : leave it, as if each rank had experts of its own; replicas then part.
    """  # noqa: E501
    recipe = require_choice("recipe", recipe, RECIPES)
    n, replicas = dist.get_world_size(), dist.get_world_size(layer.groups.expert_data)
    layer.router.grad = all_reduce(layer.router.grad, op="mean")
    for weight in (layer.up, layer.down):
        if recipe == "mean over all ranks":
            weight.grad = all_reduce(weight.grad, op="mean")
        elif recipe != "none":
            total = all_reduce(weight.grad, group=layer.groups.expert_data)
            weight.grad = total / (n if recipe == "right" else replicas)


@dataclass(frozen=True)
class ExpertRun:
    """One step on one rank beside the whole layer on the tokens of all ranks.

    differences: largest absolute one of the loss, of this rank's output and of its gradients.
    ratios: norm of a gradient over that of the right one. sent: bytes to other ranks by (phase,
    what). chosen: experts of this rank's tokens. calls: collectives by (phase, op).
    """

    differences: dict
    ratios: dict
    sent: dict
    chosen: list
    calls: dict


def check_experts(ep, *, tokens=6, hidden=8, ffn=12, experts=8, active=2, recipe="right", seed=0):
    """One step of a layer of experts cut over groups of ep ranks, in float64, beside the whole one.

    Every rank has its own `tokens`; the loss is the mean squared error of all. Returns an ExpertRun.

    >>> from parlab.distributed.launch import run_ranks
    >>> runs = run_ranks(check_experts, 4, args=(2,))
    >>> max(max(run.differences.values()) for run in runs) < 1e-12
    True
    """  # noqa: E501
    n, me = dist.get_world_size(), dist.get_rank()
    tokens = require_int("tokens", tokens, minimum=1)
    generator = torch.Generator().manual_seed(seed)
    whole = ExpertLayer(hidden, ffn, experts, active).double()
    with torch.no_grad():
        for weight in whole.parameters():
            weight.normal_(generator=generator).div_(weight.shape[-1] ** 0.5)
    x, target = torch.randn(2, n, tokens, hidden, generator=generator, dtype=torch.float64)
    groups = ExpertGroups.of(ep)
    share = ParallelExpertLayer(whole, groups)

    every = x.flatten(0, 1).requires_grad_()
    output = whole(every)
    loss = F.mse_loss(output, target.flatten(0, 1))
    loss.backward()
    mine = x[me].clone().requires_grad_()
    with CollectiveCounter() as counter:
        our_output = share(mine)
        our_loss = F.mse_loss(our_output, target[me])
        our_loss.backward()
    calls = counter.summary()
    average_gradients(share, recipe)

    place = dist.get_rank(groups.expert)
    pairs = {
        "loss": (all_reduce(our_loss, op="mean"), loss),
        "output": (our_output, output.view_as(x)[me]),
        "x": (mine.grad / n, every.grad.view_as(x)[me]),  # of the mean of n losses
        "router": (share.router.grad, whole.router.grad),
        "up": (share.up.grad, whole.up.grad.chunk(ep)[place]),
        "down": (share.down.grad, whole.down.grad.chunk(ep)[place]),
    }
    differences = {name: (a - b).abs().max().item() for name, (a, b) in pairs.items()}
    gradients = {name: pair for name, pair in pairs.items() if name in ("router", "up", "down")}
    ratios = {name: (a.norm() / b.norm()).item() for name, (a, b) in gradients.items()}
    return ExpertRun(differences, ratios, dict(groups.sent), share.chosen.tolist(), calls)
