"""The questions of chapter 4; parlab computes the answers."""

import parlab as pl
from parlab.exercises.records import Question
from parlab.units import GB

QUESTIONS = (
    Question(
        chapter=4,
        text="A 7B model on 8 GPUs, mixed-precision Adam: GB of model states per GPU under ZeRO-2?",
        unit="GB",
        answer=lambda: pl.zero_memory_bytes(7e9, 8, 2) / GB,
        why=lambda: "2 Psi + 14 Psi / 8.",
        replies=(
            (14, "That is ZeRO-3. Under ZeRO-2 the weights stay whole."),
            (
                38.5,
                "That is ZeRO-1, or 4 + 4 + 8 bytes under ZeRO-2. Mixed precision has 2 + 2 + 12, "
                "and stage 2 cuts the gradients too.",
            ),
            (
                lambda: pl.zero_memory_bytes(7e9, 8, 2) / 2**30,
                "That is in GiB. 1 GB is 10^9 bytes.",
            ),
        ),
    ),
    Question(
        chapter=4,
        text="A 7B model on 8 GPUs, mixed-precision Adam: GB of model states per GPU under ZeRO-3?",
        unit="GB",
        answer=lambda: pl.zero_memory_bytes(7e9, 8, 3) / GB,
        why=lambda: "16 Psi / 8. Activations and the gathered layers come on top.",
        replies=(
            (112, "That is without ZeRO."),
            (26.25, "That is ZeRO-2. Stage 3 cuts the weights too."),
            (lambda: 14e9 / 2**30, "That is in GiB. 1 GB is 10^9 bytes."),
        ),
    ),
    Question(
        chapter=4,
        text="What does ZeRO-3 cost, as a multiple of data parallelism's traffic? One micro-batch, "
        "weights and gradients of 2 bytes.",
        answer=lambda: pl.zero_traffic_bytes(7e9, 8, 3) / pl.zero_traffic_bytes(7e9, 8, 0),
        why=lambda: "All-gather, all-gather, reduce-scatter, where an all-reduce is one of each.",
        replies=(
            (1, "That is stages 1 and 2. Where do the weights come from in backward?"),
            (2, "A reduce-scatter or an all-gather is half an all-reduce. How many are there?"),
            (3, "Three collectives, but each is half an all-reduce."),
        ),
    ),
    Question(
        chapter=4,
        text="A 7B model on 8 GPUs under ZeRO-2, with gradients kept in fp32: GB per GPU?",
        unit="GB",
        answer=lambda: pl.zero_memory_bytes(7e9, 8, 2, grad_bytes=4) / GB,
        why=lambda: "2 Psi + 16 Psi / 8.",
        replies=(
            (26.25, "That is with gradients of 2 bytes."),
            (40.25, "The larger gradients are cut by 8 as well."),
        ),
    ),
    Question(
        chapter=4,
        text="14 GB of bf16 gradients, 8 GPUs, 4 micro-batches a step: how many GB does each GPU "
        "send in a step under ZeRO-2?",
        unit="GB",
        answer=lambda: pl.zero_traffic_bytes(7e9, 8, 2, 4) / GB,
        why=lambda: (
            f"4 reduce-scatters and one all-gather. ZeRO-1 sends "
            f"{pl.zero_traffic_bytes(7e9, 8, 1, 4) / GB:g} GB: it can wait for the last."
        ),
        replies=(
            (24.5, "That is for one micro-batch, or for ZeRO-1. Stage 2 cannot wait."),
            (98, "The weights are gathered once a step only."),
            (147, "That is ZeRO-3."),
        ),
    ),
)
