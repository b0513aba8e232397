"""One small GPT in plain PyTorch: the model of every real run.

Pre-norm blocks, learned positions and a GeLU MLP, as in GPT-2. The queries, keys and values come
from three linear layers, not one, so that a rank can hold some of the heads.

Shapes in comments: b rows of a batch, s positions, h hidden size, a heads, k heads of keys and
values, d = h / a the size of a head, f inner size of the MLP, v vocabulary.
"""

import math
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from parlab.units import require_choice, require_int, require_number

_CHOICES = {"attention": ("fused", "explicit"), "recompute": ("none", "selective", "full")}
IGNORE = -100  # a target with this value does not count, as in torch's cross-entropy


@dataclass(frozen=True)
class GPTConfig:
    """The shape of a `GPT`.

    Parameters
    ----------
    vocab : v, number of different tokens.
    layers : number of blocks.
    hidden : h; `heads` must divide it.
    heads : a.
    sequence : s, the longest that has learned positions.
    kv_heads : k, heads of keys and values, each shared by a / k heads of queries (grouped-query
        attention, arXiv 2305.13245); must divide `heads`. None is a.
    ffn : f; None is 4 h.
    dropout : probability to drop an element, after the embedding, inside attention (its weights)
        and after attention and MLP; 0 to below 1.
    tied : the head uses the token embedding's weight.
    attention : "fused" calls torch's `scaled_dot_product_attention`; "explicit" writes the same
        out, and keeps the s x s weights in memory.
    recompute : what runs once more in backward, so that only its inputs are kept: "none";
        "selective", attention between the projections; "full", every block (arXiv 2205.05198).

    Errors
    ------
    TypeError, ValueError : a size that is no positive int, or does not divide where it must.

    >>> GPTConfig(vocab=100, layers=2, hidden=32, heads=4, sequence=16).n_params
    29184
    """

    vocab: int
    layers: int
    hidden: int
    heads: int
    sequence: int
    kv_heads: int | None = None
    ffn: int | None = None
    dropout: float = 0.0
    tied: bool = True
    attention: str = "fused"
    recompute: str = "none"

    def __post_init__(self):
        for name in ("vocab", "layers", "hidden", "heads", "sequence"):
            require_int(name, getattr(self, name), minimum=1)
        object.__setattr__(self, "kv_heads", self.heads if self.kv_heads is None else self.kv_heads)
        object.__setattr__(self, "ffn", 4 * self.hidden if self.ffn is None else self.ffn)
        require_int("kv_heads", self.kv_heads, minimum=1)
        require_int("ffn", self.ffn, minimum=1)
        if self.hidden % self.heads:
            raise ValueError(
                f"heads must divide hidden, got heads {self.heads} and hidden {self.hidden}: "
                "every head works on hidden / heads of the features"
            )
        if self.heads % self.kv_heads:
            raise ValueError(
                f"kv_heads must divide heads, got kv_heads {self.kv_heads} and heads {self.heads}: "
                "every head of keys and values serves heads / kv_heads heads of queries"
            )
        require_number("dropout", self.dropout, minimum=0)
        if self.dropout >= 1:
            raise ValueError(f"dropout must be below 1, got {self.dropout}: nothing would be left")
        for name, choices in _CHOICES.items():
            object.__setattr__(self, name, require_choice(name, getattr(self, name), choices))

    @property
    def head_size(self):
        """d = h / a."""
        return self.hidden // self.heads

    @property
    def n_params(self):
        """Number of parameters, by formula; a tied head counts once."""
        h, f, kv = self.hidden, self.ffn, self.kv_heads * self.head_size
        attention = 2 * (h * h + h) + 2 * (h * kv + kv)  # q and o, k and v
        mlp = (h * f + f) + (f * h + h)
        norm = 2 * h
        embeddings = self.vocab * h + self.sequence * h
        head = 0 if self.tied else self.vocab * h
        return embeddings + self.layers * (attention + mlp + 2 * norm) + norm + head


GPT2_SMALL = GPTConfig(vocab=50257, layers=12, hidden=768, heads=12, sequence=1024)
TINY = GPTConfig(vocab=64, layers=2, hidden=32, heads=4, sequence=16)


def drop(x, probability, training):
    """Dropout that keeps a mask of one byte per element for backward, on a CPU too."""
    if probability == 0 or not training:
        return x
    # F.dropout on a CPU keeps a mask in x's own dtype.
    return torch.native_dropout(x, probability, True)[0]


def run_again_in_backward(function, *inputs):
    """function(*inputs), of which only the inputs are kept."""
    return checkpoint(function, *inputs, use_reentrant=False)


class Attention(nn.Module):
    """Causal attention; the number of heads is read off the widths that q, k and v give.

    So a rank that holds slices of these layers' weights, whole heads each, runs the same code.
    """

    def __init__(self, config):
        super().__init__()
        kv_size = config.kv_heads * config.head_size
        self.q = nn.Linear(config.hidden, config.hidden)
        self.k = nn.Linear(config.hidden, kv_size)
        self.v = nn.Linear(config.hidden, kv_size)
        self.o = nn.Linear(config.hidden, config.hidden)
        self.head_size = config.head_size
        self.dropout = config.dropout
        self.attend = attend_fused if config.attention == "fused" else attend_explicitly
        if config.recompute == "selective":
            self.attend = partial(run_again_in_backward, self.attend)

    def forward(self, x):
        q, k, v = (self._heads(layer(x)) for layer in (self.q, self.k, self.v))  # (b, a or k, s, d)
        if k.shape[1] < q.shape[1]:
            groups = q.shape[1] // k.shape[1]
            k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        out = self.attend(q, k, v, self.dropout if self.training else 0.0)  # (b, a, s, d)
        out = self.o(out.transpose(1, 2).flatten(2))  # (b, s, h)
        return drop(out, self.dropout, self.training)

    def _heads(self, x):
        return x.unflatten(-1, (-1, self.head_size)).transpose(1, 2)


def attend_fused(q, k, v, dropout):
    """torch's kernel, which need not keep the s x s weights."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout)


def attend_explicitly(q, k, v, dropout):
    """softmax(q k' / sqrt(d)) v, where no position sees a later one."""
    s = q.shape[-2]
    scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-2, -1)  # (b, a, s, s)
    later = torch.full((s, s), -math.inf, dtype=q.dtype, device=q.device).triu(1)
    weights = (scores + later).softmax(-1)
    return drop(weights, dropout, True) @ v


class MLP(nn.Module):
    """GeLU(x A + a) B + b, with the tanh form of GeLU."""

    def __init__(self, config):
        super().__init__()
        self.up = nn.Linear(config.hidden, config.ffn)
        self.down = nn.Linear(config.ffn, config.hidden)
        self.dropout = config.dropout

    def forward(self, x):
        out = self.down(F.gelu(self.up(x), approximate="tanh"))  # (b, s, f) inside
        return drop(out, self.dropout, self.training)


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config):
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.hidden)
        self.attention = Attention(config)
        self.mlp_norm = nn.LayerNorm(config.hidden)
        self.mlp = MLP(config)
        self.recompute = config.recompute

    def forward(self, x):
        if self.recompute == "full":
            return run_again_in_backward(self._forward, x)
        return self._forward(x)

    def _forward(self, x):
        x = x + self.attention(self.attention_norm(x))  # (b, s, h)
        return x + self.mlp(self.mlp_norm(x))


class GPT(nn.Module):
    """Tokens (b, s) to logits (b, s, v). The same seed gives the same weights on every device.

    >>> logits = GPT(TINY, seed=1)(torch.tensor([[1, 2, 3]]))
    >>> tuple(logits.shape)
    (1, 3, 64)
    """

    def __init__(self, config, seed=0):
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocab, config.hidden)
        self.positions = nn.Embedding(config.sequence, config.hidden)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.hidden)
        self.head = nn.Linear(config.hidden, config.vocab, bias=False)
        if config.tied:
            self.head.weight = self.tokens.weight
        draw_weights(self, seed)

    def forward(self, tokens):
        s = tokens.shape[1]
        if s > self.config.sequence:
            raise ValueError(
                f"tokens may have {self.config.sequence} positions, got {s}: the others "
                "have no learned embedding"
            )
        x = self.tokens(tokens) + self.positions.weight[:s]  # (b, s, h)
        x = drop(x, self.config.dropout, self.training)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))  # (b, s, v)


@torch.no_grad()
def draw_weights(model, seed):
    """GPT-2's start: normal with deviation 0.02, less on the way back into x; biases 0, gains 1.

    The deviation of o and down is 0.02 / sqrt(2 layers), so that x grows with depth no more than
    with two layers' worth of sums. Drawn on the CPU in float32 whatever the model's device and
    dtype.
    """
    generator = torch.Generator().manual_seed(seed)
    into_x = 0.02 / math.sqrt(2 * model.config.layers)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.zero_()
        elif parameter.dim() == 1:
            parameter.fill_(1.0)
        else:
            deviation = into_x if name.endswith(("o.weight", "down.weight")) else 0.02
            drawn = torch.randn(
                parameter.shape, generator=generator, dtype=torch.float32, device="cpu"
            )
            parameter.copy_(drawn * deviation)


def token_loss(logits, targets, reduction="mean"):
    """Cross-entropy of the targets that count, their mean or their sum; 0 where none counts.

    logits: (b, s, v); targets: (b, s) int64, `IGNORE` where nothing is to be predicted.

    >>> targets = torch.tensor([[3, 0, IGNORE]])
    >>> round(token_loss(torch.zeros(1, 3, 8), targets, "sum").item(), 4)  # 2 ln 8
    4.1589
    """
    reduction = require_choice("reduction", reduction, ("mean", "sum"))
    if logits.dtype in (torch.bfloat16, torch.float16):
        logits = logits.float()  # a sum over thousands of tokens has no digits left otherwise
    total = F.cross_entropy(
        logits.flatten(0, -2), targets.flatten(), ignore_index=IGNORE, reduction="sum"
    )
    return total if reduction == "sum" else total / (targets != IGNORE).sum().clamp(min=1)


def token_batch(config, rows, seed=0, lengths=None):
    """Tokens and their next tokens, two (rows, s) tensors, the same for the same seed.

    Each row counts upwards by its own stride from 1 to 4, so that there is something to learn.

    lengths: how many targets of each row count; the others are `IGNORE`. None counts them all.

    >>> tokens, targets = token_batch(TINY, rows=2)
    >>> tokens[0, :4].tolist(), targets[0, :4].tolist()
    ([44, 46, 48, 50], [46, 48, 50, 52])
    """
    require_int("rows", rows, minimum=0)
    generator = torch.Generator().manual_seed(seed)
    start = torch.randint(config.vocab, (rows, 1), generator=generator)
    stride = torch.randint(1, 5, (rows, 1), generator=generator)
    row = (start + stride * torch.arange(config.sequence + 1)) % config.vocab  # (rows, s + 1)
    tokens, targets = row[:, :-1].contiguous(), row[:, 1:].contiguous()
    if lengths is not None:
        if len(lengths) != rows:
            raise ValueError(f"lengths must hold one number per row, {rows}, got {len(lengths)}")
        for length in lengths:
            require_int("lengths", length, minimum=0, maximum=config.sequence)
        counted = torch.arange(config.sequence) < torch.tensor(lengths).reshape(-1, 1)
        targets = targets.where(counted, IGNORE)
    return tokens, targets
