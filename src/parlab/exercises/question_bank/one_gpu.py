"""The questions of chapter 10; parlab computes the answers."""

import parlab as pl
from parlab.exercises.records import Question
from parlab.units import GB


def _gpt2_step(micro_batch=1, **options):
    return pl.autocast_memory(pl.model("gpt2"), micro_batch, sequence=1024, **options)


def _kept_by_checkpointing():
    """The share of a layer's bytes that full recomputation keeps, under eager autocast."""
    none, full = (
        next(i.bytes[1] for i in _gpt2_step(recompute=how).items if i.name == "layers")
        for how in ("none", "full")
    )
    return full / none


def _most_sequences(room):
    fixed, each = pl.activation_line(pl.model("gpt2"), sequence=1024)
    return (room - fixed) // each


QUESTIONS = (
    Question(
        chapter=10,
        text="GPT-2 has 124,439,808 parameters. How many GB does a card hold between two steps of "
        "AdamW under autocast, gradients included?",
        unit="GB",
        answer=lambda: 16 * pl.model("gpt2").n_params / GB,
        why=lambda: "4 bytes of weights, 4 of gradients, 8 of moments for each parameter.",
        replies=(
            (lambda: 12 * 0.124439808, "Gradients are still there until zero_grad frees them."),
            (lambda: 4 * 0.124439808, "Those are the weights alone."),
            (lambda: 8 * 0.124439808, "AdamW keeps two moments besides, 8 bytes."),
            (lambda: 20 * 0.124439808, "The optimizer's temporaries are gone after its step."),
        ),
    ),
    Question(
        chapter=10,
        text="8192 tokens, a vocabulary of 50,257, PyTorch's cross_entropy in fp32: how many GB do "
        "the log-softmax and the gradients of the logits take in the loss's backward?",
        unit="GB",
        answer=lambda: 3 * pl.logits_bytes(8192, 50257) / GB,
        why=lambda: "Three fp32 tensors of that size, 12 bytes a logit.",
        replies=(
            (lambda: pl.logits_bytes(8192, 50257) / GB, "One tensor; backward makes two more."),
            (lambda: 2 * pl.logits_bytes(8192, 50257) / GB, "Backward makes two gradients."),
            (lambda: pl.logits_bytes(8192, 50257) / GB / 2, "That is one copy in 16 bits."),
        ),
    ),
    Question(
        chapter=10,
        text="Full checkpointing under eager autocast: which part of a layer's kept bytes remains "
        "for GPT-2 (h = 768, 12 heads)? A fraction of 1.",
        answer=_kept_by_checkpointing,
        why=lambda: "The layer's input in fp32, 4 sbh of some 40.",
        replies=(
            (1 / 16, "That is 2 of 32 sbh, where all is in 16 bits. The input here is in fp32."),
            (2 / 34, "That is the papers' 2 of 34 sbh, with dropout and 16 bits throughout."),
            (0, "The layer's input must be there to begin again."),
            (0.05, "2 of 40: but the input is in fp32."),
        ),
    ),
    Question(
        chapter=10,
        text="Checkpointing cut the layers' activations to a tenth, but GPT-2's peak by a quarter "
        "only. Why?",
        choices={
            "a": "the recomputed layer is in the peak",
            "b": "states, logits and the logits' gradients did not move, and they were most of it",
            "c": "the allocator keeps the freed blocks",
        },
        answer="b",
        why=lambda: "The peak is in the loss's backward, before any layer is computed again.",
        replies=(
            ("a", "At the peak no layer has been recomputed yet; and one layer is a twelfth."),
            ("c", "It does, but max_memory_allocated counts what tensors hold."),
        ),
    ),
    Question(
        chapter=10,
        text="A sweep of GPT-2 fits a peak of 1.740 GB + 0.977 MB a token. A card has 8.0 GB of "
        "room. How many sequences of 1024 tokens fit?",
        tolerance=0,
        answer=lambda: _most_sequences(8e9),
        why=lambda: "(8.0 - 1.740) GB over 1.0006 GB a sequence, rounded down.",
        replies=(
            (7, "Seven need 8.74 GB."),
            (8, "The states and casts, 1.74 GB, do not wait."),
            (5, "One more fits."),
        ),
    ),
    Question(
        chapter=10,
        text="494,032,768 parameters with fp32 weights and gradients, and moments in 8 bits: how "
        "many GB of model states?",
        unit="GB",
        answer=lambda: pl.BYTE_RECIPES["8-bit-adam"].total * pl.model("qwen2.5-0.5b").n_params / GB,
        why=lambda: "4 + 4 + 2 bytes a parameter; the scales of the 8-bit blocks are small.",
        replies=(
            (lambda: 16 * 0.494032768, "That is with moments in fp32, 8 bytes for both."),
            (lambda: 9 * 0.494032768, "There are two moments, one byte each."),
            (lambda: 6 * 0.494032768, "The weights and the gradients stay in fp32 here."),
        ),
    ),
    Question(
        chapter=10,
        text="nvidia-smi shows 7.1 GB, max_memory_allocated 5.8 GB. Which one is held against the "
        "prediction of tensors?",
        choices={
            "a": "nvidia-smi: that is what the card really uses",
            "b": "max_memory_allocated, after reset_peak_memory_stats",
            "c": "the mean of both",
        },
        answer="b",
        why=lambda: "nvidia-smi adds what the allocator keeps, CUDA's context and others' memory.",
        replies=(
            ("a", "It is what must fit, but it holds more than tensors."),
            ("c", "They count different things."),
        ),
    ),
)
