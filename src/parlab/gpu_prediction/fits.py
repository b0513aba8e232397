"""Which ways of fine-tuning a model fit on a card, and what an out-of-memory error means."""

from typing import NamedTuple

from parlab.memory.activations import activation_memory_bytes
from parlab.memory.states import BYTE_RECIPES
from parlab.models import ModelConfig
from parlab.units import format_bytes, require_int, require_number


class Way(NamedTuple):
    """One way of training: bytes between steps, and at the three moments that may be fullest.

    in_loss: in the loss's backward. in_backward: at its end, with all gradients. in_optimizer: in
    the optimizer's step.
    """

    name: str
    states: int
    in_loss: int
    in_backward: int
    in_optimizer: int
    fits: bool

    @property
    def peak(self):
        """The largest of the three."""
        return max(self.in_loss, self.in_backward, self.in_optimizer)


def lora_params(config, rank):
    """Number of parameters that LoRA trains: r (inputs + outputs) of every matrix of every layer.

    Hu et al. (arXiv 2106.09685), section 4.1: a matrix of n x m gets B (n x r) and A (r x m). Here
    all of attention and the MLP have them, not the embedding.

    config: a ModelConfig without experts. rank: r.

    >>> from parlab.models import model
    >>> lora_params(model("qwen2.5-0.5b"), 16)
    8798208
    """
    if not isinstance(config, ModelConfig) or config.experts > 1:
        raise ValueError(f"config must be a ModelConfig without experts, got {config!r:.60}")
    r = require_int("rank", rank, minimum=1)
    h, queries = config.hidden, config.heads * config.head_size
    keys = config.kv_heads * config.head_size
    sides = 2 * (h + queries) + 2 * (h + keys) + (3 if config.gated else 2) * (h + config.ffn)
    return config.layers * r * sides


def ways_to_fit(config, card_bytes, *, tokens=512, lora_rank=16):
    """What full fine-tuning, 8-bit moments and LoRA need of a card under autocast, as `Way`s.

    in_loss: weights and moments, 16-bit casts of fp32 weights, activations of all layers by
    `activation_memory` (a flash kernel, no dropout) and 12 bytes for each of tokens x V logits.
    in_backward: the states and, where the head is tied, a second gradient of the embedding, 4 V h.
    in_optimizer: the states and what the step makes: 4 bytes for each trained parameter (foreach),
    8 for those of the largest parameter, the embedding (one at a time), or nothing (fused).
    8-bit moments: no scales counted, and a step that works one at a time in one kernel.

    config: a ModelConfig without experts. card_bytes: bytes that the card has for tensors. tokens:
    of one sequence, the micro-batch. lora_rank: r; LoRA trains in fp32, beside 16-bit weights.

    >>> from parlab.models import model
    >>> for way in ways_to_fit(model("qwen2.5-0.5b"), 8e9):
    ...     print(f"{way.name:34} {way.states / 1e9:5.2f} {way.peak / 1e9:5.2f}", way.fits)
    full, AdamW (foreach)               7.90  9.88 False
    full, AdamW, one at a time          7.90  8.99 False
    full, AdamW (fused)                 7.90  8.47 False
    full, moments in 8 bits             4.94  5.50 True
    LoRA of rank 16, 16-bit weights     1.13  2.66 True
    """
    card = require_number("card_bytes", card_bytes, minimum=0, exclusive=True)
    tokens = require_int("tokens", tokens, minimum=1)
    lora = lora_params(config, lora_rank)
    psi, table = config.n_params, config.vocab * config.hidden
    in_loss = 12 * tokens * config.vocab
    in_loss += activation_memory_bytes(config, 1, sequence=tokens, dropout=False, flash=True)
    second = 4 * table if config.tied else 0
    moments = BYTE_RECIPES["8-bit-adam"].k

    def way(name, before, gradients, casts, in_backward, in_optimizer):
        """before: bytes of weights and moments, which are there when forward starts."""
        states = before + gradients
        peaks = (before + casts + in_loss, states + in_backward, states + in_optimizer)
        return Way(name, states, *peaks, max(peaks) <= card)

    full = (12 * psi, 4 * psi, 2 * psi, second)
    return (
        way("full, AdamW (foreach)", *full, 4 * psi),
        way("full, AdamW, one at a time", *full, 8 * table),
        way("full, AdamW (fused)", *full, 0),
        way("full, moments in 8 bits", (4 + moments) * psi, 4 * psi, 2 * psi, second, 0),
        way(
            f"LoRA of rank {lora_rank}, 16-bit weights",
            2 * psi + 12 * lora,
            4 * lora,
            2 * lora,
            0,
            4 * lora,
        ),
    )


def explain_out_of_memory(config, card_bytes, tokens=512):
    """Say in a few lines why full fine-tuning with AdamW does not fit on a card, or that it does.

    The parameters are those of `ways_to_fit`.

    >>> from parlab.models import model
    >>> print(explain_out_of_memory(model("qwen2.5-0.5b"), 8e9))
    494,032,768 parameters with 4 + 4 + 8 bytes each: 7.9 GB between steps.
    AdamW's step makes 4 more for each: 9.88 GB. The card has 8 GB.
    What fits: full, moments in 8 bits (5.5 GB); LoRA of rank 16, 16-bit weights (2.66 GB).
    """
    ways = ways_to_fit(config, card_bytes, tokens=tokens)
    fitting = [f"{way.name} ({format_bytes(way.peak)})" for way in ways if way.fits]
    return (
        f"{config.n_params:,} parameters with 4 + 4 + 8 bytes each: "
        f"{format_bytes(ways[0].states)} between steps.\n"
        f"AdamW's step makes 4 more for each: {format_bytes(ways[0].in_optimizer)}. "
        f"The card has {format_bytes(card_bytes)}.\n"
        f"What fits: {'; '.join(fitting) or 'none of the ways that are known here'}."
    )
