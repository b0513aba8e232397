"""A transformer layer of production size, cut as a rank holds it.

It keeps for backward what `parlab.memory.activations` lists; the same in plain operators keeps
more. Biases are left out, since they keep nothing, and so are rotary positions, which keep their
tables. (But a rotation makes new queries and keys: if q, k and v came as one packed tensor, the
values, a view of it, then keep the old ones as well.)

Shapes in comments: b rows of a batch, s positions, h hidden size, a heads, k heads of keys and
values, g = a / k, d the size of a head, f inner size of the MLP, t ranks.
"""

import math

import torch
from torch import nn
from torch.nn import functional as F

from parlab.distributed import compat
from parlab.distributed.gpt import drop, run_again_in_backward
from parlab.distributed.sharding import gather_sequence, scatter_sequence
from parlab.units import require_int


def stay(x):
    """Neither enter nor leave a tensor-parallel region."""
    return x


class Recomputed(nn.Module):
    """A module that keeps its inputs only and runs once more in backward."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, *inputs):
        return run_again_in_backward(self.module, *inputs)


def in_segments(layers, size):
    """Layers one after the other, of which every `size` (or the last few) run again together."""
    starts = range(0, len(layers), require_int("size", size, minimum=1))
    segments = (Recomputed(nn.Sequential(*layers[start : start + size])) for start in starts)
    return nn.Sequential(*segments)


class RMSNorm(nn.Module):
    """x / rms(x) times a gain, which keeps x and a number a token.

    Written in plain operators, as torch's is on a CPU, it keeps x twice in fp32: 8 bytes an
    element instead of 2.
    """

    def __init__(self, hidden, dtype):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden, dtype=dtype))

    def forward(self, x):
        return _RMSNorm.apply(x, self.weight)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        wide = x.float()
        rstd = (wide.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
        ctx.save_for_backward(x, weight, rstd)
        return (wide * rstd).to(x.dtype) * weight

    @staticmethod
    def backward(ctx, gradient):
        x, weight, rstd = ctx.saved_tensors
        normed, gradient = x.float() * rstd, gradient.float()
        for_normed = gradient * weight
        along = (for_normed * normed).mean(-1, keepdim=True)
        for_weight = (gradient * normed).flatten(0, -2).sum(0)
        return (rstd * (for_normed - normed * along)).to(x.dtype), for_weight.to(weight.dtype)


class _GatheredLinears(torch.autograd.Function):
    """Linear layers of a sequence of which this rank keeps its own positions only.

    Backward gathers it once more, as Megatron-LM does (arXiv 2205.05198, section 4.2.2).
    """

    @staticmethod
    def forward(ctx, x, *weights):
        ctx.save_for_backward(x, *weights)
        whole = gather_sequence(x)  # (b, s / t, h) to (b, s, h)
        return tuple(F.linear(whole, weight) for weight in weights)

    @staticmethod
    def backward(ctx, *gradients):
        x, *weights = ctx.saved_tensors
        whole = gather_sequence(x).flatten(0, 1)
        pairs = list(zip(gradients, weights, strict=True))
        for_x = scatter_sequence(sum(gradient @ weight for gradient, weight in pairs))
        return for_x, *(gradient.flatten(0, 1).T @ whole for gradient in gradients)


class Projections(nn.Module):
    """Linear layers of one input: queries, keys and values, or gate and up."""

    def __init__(self, hidden, widths, enter, dtype):
        super().__init__()
        linears = (nn.Linear(hidden, width, bias=False, dtype=dtype) for width in widths)
        self.linears = nn.ModuleList(linears)
        self.enter = enter

    def forward(self, x):
        weights = [linear.weight for linear in self.linears]
        if self.enter is gather_sequence:
            return _GatheredLinears.apply(x, *weights)
        x = self.enter(x)
        return tuple(F.linear(x, weight) for weight in weights)


class Core(nn.Module):
    """Attention between the projections, causal.

    kind: "naive" writes it out, without repeating keys and values for the heads that share them;
        "flash" is torch's kernel for this device; "gpu-flash" is the GPU's operator, which a CPU
        traces with fake tensors.
    """

    def __init__(self, kind, dropout):
        super().__init__()
        self.kind, self.dropout = kind, dropout

    def forward(self, q, k, v):  # (b, a, s, d), (b, k, s, d) twice
        if self.kind == "gpu-flash":
            return compat.gpu_flash_attention(q, k, v, self.dropout)
        if self.kind == "flash":
            grouped = q.shape[1] > k.shape[1]
            return F.scaled_dot_product_attention(
                q, k, v, dropout_p=self.dropout, is_causal=True, enable_gqa=grouped
            )
        s, group = q.shape[2], (k.shape[1], q.shape[1] // k.shape[1])
        q = (q * q.shape[-1] ** -0.5).unflatten(1, group).flatten(2, 3)  # (b, k, g s, d)
        scores = q.contiguous() @ k.contiguous().transpose(2, 3)  # (b, k, g s, s)
        later = torch.full((s, s), -math.inf, dtype=q.dtype, device=q.device).triu(1)
        weights = (scores.unflatten(2, (-1, s)) + later).softmax(-1).flatten(2, 3)
        out = drop(weights, self.dropout, True) @ v.contiguous()
        return out.unflatten(2, (-1, s)).flatten(1, 2)


class Attention(nn.Module):
    """Multi-head or grouped-query attention."""

    def __init__(self, config, core, enter, leave, dropout, dtype):
        super().__init__()
        self.head_size = config.head_size
        queries, keys = config.heads * self.head_size, config.kv_heads * self.head_size
        self.project = Projections(config.hidden, (queries, keys, keys), enter, dtype)
        self.core = core
        self.o = nn.Linear(queries, config.hidden, bias=False, dtype=dtype)
        self.leave, self.dropout = leave, dropout

    def forward(self, x):
        heads = (y.unflatten(-1, (-1, self.head_size)).transpose(1, 2) for y in self.project(x))
        out = self.core(*heads).transpose(1, 2).flatten(2)  # (b, s, a d)
        return drop(self.leave(self.o(out)), self.dropout, True)


class MLP(nn.Module):
    """GeLU(x A) B, or with a gate (SiLU(x G) * x A) B."""

    def __init__(self, config, enter, leave, dropout, dtype):
        super().__init__()
        widths = (config.ffn,) * (2 if config.gated else 1)
        self.project = Projections(config.hidden, widths, enter, dtype)
        self.down = nn.Linear(config.ffn, config.hidden, bias=False, dtype=dtype)
        self.leave, self.dropout = leave, dropout

    def forward(self, x):
        first, *up = self.project(x)  # (b, s, f)
        inner = F.silu(first) * up[0] if up else F.gelu(first, approximate="tanh")
        return drop(self.leave(self.down(inner)), self.dropout, True)


class Layer(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)), of the shape of a ModelConfig.

    enter, leave: what stands before and after the parts that tensor parallelism cuts.
    """

    def __init__(
        self,
        config,
        attention="naive",
        dropout=0.0,
        selective=False,
        enter=stay,
        leave=stay,
        dtype=torch.float32,
    ):
        super().__init__()
        norm = RMSNorm if config.norm == "rms" else nn.LayerNorm
        core = Core(attention, dropout)
        core = Recomputed(core) if selective else core
        self.attention_norm = norm(config.hidden, dtype=dtype)
        self.attention = Attention(config, core, enter, leave, dropout, dtype)
        self.mlp_norm = norm(config.hidden, dtype=dtype)
        self.mlp = MLP(config, enter, leave, dropout, dtype)

    def forward(self, x):
        x = x + self.attention(self.attention_norm(x))  # (b, s, h)
        return x + self.mlp(self.mlp_norm(x))
