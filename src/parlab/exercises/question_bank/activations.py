"""The questions of chapter 5; parlab computes the answers."""

import parlab as pl
from parlab.exercises.records import Question
from parlab.units import GB


def _gpt3(recompute):
    config = pl.ModelConfig(layers=1, hidden=12288, heads=96, vocab=51200)
    return pl.activation_memory_bytes(config, 1, sequence=2048, recompute=recompute)


_SBH = 2048 * 12288

QUESTIONS = (
    Question(
        chapter=5,
        text="GPT-3 (h = 12288, 96 heads), s = 2048: how many sbh bytes do attention's scores take "
        "in a layer, beside the other 34?",
        unit="sbh",
        answer=lambda: (_gpt3("none") - _gpt3("selective")) / _SBH,
        why=lambda: "5 a s / h.",
        replies=(
            (lambda: 5 * 2048 / 12288, "Each of the 96 heads has scores of its own."),
            (34, "That is all the rest."),
            (114, "That is with the other 34."),
            (16, "Five bytes a score: softmax, mask, and the output of dropout."),
        ),
    ),
    Question(
        chapter=5,
        text="34 sbh and 80 sbh of scores: which fraction is left with selective recomputation?",
        answer=lambda: _gpt3("selective") / _gpt3("none"),
        why=lambda: "34/114, for a few percent more computing.",
        replies=(
            (lambda: 80 / 114, "That is what goes."),
            (lambda: 2 / 114, "That is full recomputation."),
        ),
    ),
    Question(
        chapter=5,
        text="With a flash attention kernel, what does selective recomputation save?",
        choices={
            "a": "nearly nothing",
            "b": "the same 80 of 114",
            "c": "everything but the inputs of layers",
        },
        answer="a",
        why=lambda: "A flash kernel never writes the scores: there is no s^2 term left to drop.",
        replies=(
            ("b", "Which tensors does selective recomputation drop, and does a flash kernel keep?"),
            ("c", "That is full recomputation."),
        ),
    ),
    Question(
        chapter=5,
        text="70B parameters at 16 bytes, cut over 8 cards of 80 GB: how many GB of states has "
        "each card?",
        unit="GB",
        answer=lambda: pl.zero_memory_bytes(70e9, 8, 3) / GB,
        why=lambda: (
            "More than the card holds, before any activation: two nodes of 8 are the least, with "
            f"{pl.zero_memory_bytes(70e9, 16, 3) / GB:g} GB a card."
        ),
        replies=(
            (1120, "That is all of it: cut it over the 8 cards."),
            (17.5, "That is the weights only, 2 bytes a parameter."),
        ),
    ),
    Question(
        chapter=5,
        text="8192 tokens, a vocabulary of 151,936: how many GiB is one fp32 copy of the logits?",
        unit="GiB",
        answer=lambda: pl.logits_bytes(8192, 151_936) / 2**30,
        why=lambda: "And a copy in bf16 beside it, on the last pipeline stage.",
        replies=(
            (lambda: pl.logits_bytes(8192, 151_936) / 1e9, "That is in GB; this question has GiB."),
            (
                lambda: pl.logits_bytes(8192, 151_936, element_bytes=2) / 2**30,
                "That is in bf16. fp32 has 4 bytes.",
            ),
        ),
    ),
)
