"""The questions of chapter 11; parlab computes the answers."""

import parlab as pl
from parlab.exercises.records import Question


def _root_params():
    gpt2 = pl.model("gpt2")
    return gpt2.n_params - gpt2.layers * gpt2.layer_params


QUESTIONS = (
    Question(
        chapter=11,
        text="fully_shard on one card: how does its memory between two steps compare with the "
        "plain model's?",
        choices={
            "a": "it is smaller, since optimizer states are sharded",
            "b": "it is the same",
            "c": "it is larger by the gathered weights",
        },
        answer="b",
        why=lambda: "One rank's shard is the whole weight, and gathered copies are gone.",
        replies=(
            ("a", "Over how many ranks?"),
            ("c", "Those are there during the step, not after it."),
        ),
    ),
    Question(
        chapter=11,
        text="GPT-2's root unit: embedding 50,257 x 768, positions 1024 x 768, a norm of 2 x 768. "
        "By how many MB does fully_shard in fp32 raise the peak at N = 1?",
        unit="MB",
        answer=lambda: 4 * _root_params() / 1e6,
        why=lambda: "The root's weights are there twice from forward to the end of backward.",
        replies=(
            (lambda: 2 * _root_params() / 1e6, "It gathers in fp32 unless told otherwise."),
            (lambda: 4 * 0.124439808e3, "Blocks are gathered one by one and freed."),
            (lambda: 4 * 50257 * 768 / 1e6, "Positions and the last norm are in no block either."),
            (0, "That is the difference between steps."),
        ),
    ),
    Question(
        chapter=11,
        text="CPUOffloadPolicy, AdamW, fp32: by how many bytes a parameter does the peak in the "
        "loss's backward fall?",
        tolerance=0,
        answer=lambda: 12,
        why=lambda: "Weights 4 and moments 8. There are no gradients at that moment.",
        replies=(
            (16, "At that moment zero_grad has freed the gradients and backward made none yet."),
            (8, "The weights move too."),
            (4, "AdamW's moments move too."),
        ),
    ),
    Question(
        chapter=11,
        text="Which part of offloading's cost in time cannot hide behind the card's computing?",
        choices={
            "a": "the weights' way to the card",
            "b": "the gradients' way to the host",
            "c": "the optimizer on the host",
        },
        answer="c",
        why=lambda: "It waits for the last gradient, and the next forward waits for it.",
        replies=(
            ("a", "The next block's weights can travel while this block computes."),
            ("b", "All but the last can travel while backward goes on."),
        ),
    ),
    Question(
        chapter=11,
        text="GPT-2, 124,439,808 parameters in blocks of 85,054,464 together: how many MB go up to "
        "the card in a step under CPUOffloadPolicy, in fp32?",
        unit="MB",
        answer=lambda: 4 * (2 * pl.model("gpt2").n_params - _root_params()) / 1e6,
        why=lambda: "Blocks twice, for forward and backward; the root once.",
        replies=(
            (lambda: 4 * 0.124439808e3, "Blocks are freed after forward and needed in backward."),
            (lambda: 8 * 0.124439808e3, "The root stays from forward to backward: once."),
        ),
    ),
    Question(
        chapter=11,
        text="A T4 multiplies two matrices of 4096 x 4096 in 5 ms. Which share of its 65 TFLOP/s "
        "is that?",
        answer=lambda: 2 * 4096**3 / 5e-3 / pl.gpu("t4").fp16_flop_per_s,
        why=lambda: "2 n^3 FLOP: a multiplication and an addition for each of n^3 pairs.",
        replies=(
            (lambda: 4096**3 / 5e-3 / 65e12, "Each of the n^3 products is added too: 2 n^3."),
            (lambda: 2 * 4096**2 / 5e-3 / 65e12, "An element of the result takes n products."),
        ),
    ),
)
