"""The questions of chapter 2; parlab computes the answers."""

import parlab as pl
from parlab.exercises.records import Question

QUESTIONS = (
    Question(
        chapter=2,
        text="Each DDP rank takes the mean loss over its own non-padding tokens, and ranks have "
        "different numbers of them. What is wrong with averaging these gradients?",
        choices={
            "a": "nothing: a mean of means is the mean",
            "b": "tokens on ranks with few of them weigh more",
            "c": "tokens on ranks with many of them weigh more",
            "d": "the gradient is N times too large",
        },
        answer="b",
        why=lambda: "Each rank has weight 1/N, however few tokens share it.",
        replies=(
            ("a", "Only if all means are over equally many."),
            ("c", "All ranks weigh the same. So who shares a rank's weight with fewer others?"),
            ("d", "DDP divides by N. The weights are wrong, not the scale."),
        ),
    ),
    Question(
        chapter=2,
        text="Rank 0 has 2 tokens with mean loss 1, rank 1 has 8 with mean loss 4. What is the "
        "mean loss per token?",
        answer=lambda: pl.token_weighted_mean([1, 4], [2, 8]),
        why=lambda: "(2 x 1 + 8 x 4) / 10; the mean of means is 2.5.",
        replies=(
            (2.5, "That is the mean of means. 8 tokens should count four times as much as 2."),
            (0.5, "The losses are means already: multiply each by its tokens."),
            (6.8, "Divide by all tokens, once."),
            (1.7, "Divide by all tokens, once; not by the ranks as well."),
        ),
    ),
    Question(
        chapter=2,
        text="Ranks have different numbers of tokens: what is the fix?",
        choices={
            "a": "a smaller learning rate",
            "b": "pad all ranks to the same length and include the padding",
            "c": "sum the loss over tokens, and divide by the tokens of all ranks",
            "d": "weigh each rank by its number of sequences",
        },
        answer="c",
        why=lambda: "All-reduce the token count too; and if DDP divides by N, multiply by N.",
        replies=(
            ("a", "The weights between tokens stay wrong."),
            ("b", "Then the model learns to predict padding."),
            ("d", "Sequences have different numbers of tokens as well."),
        ),
    ),
    Question(
        chapter=2,
        text="10 items on 4 ranks, with a sampler that repeats items until all ranks have equally "
        "many: how many items does an epoch visit?",
        answer=lambda: pl.padded_elements(10, 4),
        tolerance=0,
        why=lambda: (
            "Two items count twice; with drop_last it would be 8, and two would be missing."
        ),
        replies=(
            (10, "4 does not divide 10, and all ranks must take equally many steps."),
            (8, "That is drop_last: it leaves items out."),
            (3, "That is one rank's share."),
        ),
    ),
    Question(
        chapter=2,
        text="A port of your training code needs a learning rate of exactly 1/8 on 8 GPUs to do "
        "the same. What is your guess?",
        choices={
            "a": "it sums gradients and does not average them",
            "b": "it averages twice",
            "c": "one rank's gradient is dropped",
            "d": "the ranks see the same data",
        },
        answer="a",
        why=lambda: "8 times too large, with SGD. Adam divides the scale out, and nobody notices.",
        replies=(
            ("b", "Then the steps would be too small."),
            ("c", "Then they would be 7/8 as long, and not in quite the right direction."),
            ("d", "Then the mean would have the right scale."),
        ),
    ),
)
