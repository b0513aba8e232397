"""The questions of chapter 9; parlab computes the answers."""

import parlab as pl
from parlab.exercises.records import Question


def _replicas(world, **degrees):
    return world // pl.Layout(**degrees).world


def _least_nodes():
    config, nodes = pl.model("llama-2-70b"), 1
    while not pl.search(config, pl.cluster("hgx-h100", nodes), 4096, 64, foreach=False).best:
        nodes += 1
    return nodes


QUESTIONS = (
    Question(
        chapter=9,
        text="512 GPUs, tp = 8, pp = 4, cp = 2, ep = 8: how many data-parallel ranks are there?",
        tolerance=0,
        answer=lambda: _replicas(512, tp=8, pp=4, cp=2),
        why=lambda: "512 / (8 x 4 x 2). ep is no factor: experts spread over ranks that exist.",
        replies=(
            (1, "ep is no factor of the world: experts spread over the dp x cp ranks."),
            (16, "Context-parallel ranks are different GPUs as well."),
            (64, "Of these, pp and cp take their part."),
        ),
    ),
    Question(
        chapter=9,
        text="Why does tensor parallelism stay inside a node, while data parallelism spans nodes?",
        choices={
            "a": "data parallelism sends fewer bytes in all",
            "b": "its collectives stand between matrix products, many times per micro-batch; "
            "gradients travel once, beside compute",
            "c": "NCCL cannot all-reduce activations across nodes",
        },
        answer="b",
        why=lambda: "It is not the bytes alone but what waits for them.",
        replies=(
            ("a", "Not always: gradients of a large model are more bytes than its activations."),
            ("c", "It can. What does the GPU do meanwhile?"),
        ),
    ),
    Question(
        chapter=9,
        text="How many nodes of 8 H100s (80 GB) does Llama-2-70B need at least to train on "
        "sequences of 4096, 64 an iteration, with a fused Adam and any layout of this chapter?",
        tolerance=0,
        answer=_least_nodes,
        why=lambda: "16 bytes x 69e9 over 16 cards are 69 GB; 8 cards would need 138 GB each.",
        replies=(
            (1, "Compute the states per card first."),
            (4, "With full recomputation or small micro-batches fewer will do."),
        ),
    ),
    Question(
        chapter=9,
        text="A planner predicts 17.8 s for one layout and 18.0 s for another; its mean error on "
        "runs it never saw is 6%. Which is faster?",
        choices={
            "a": "the first",
            "b": "the second",
            "c": "it cannot tell: take the simpler one, or measure both",
        },
        answer="c",
        why=lambda: "They differ by 1%. Errors of similar layouts are alike, but not that alike.",
        replies=(
            ("a", "By 1%, with an error of 6%?"),
            ("b", "Why should it be?"),
        ),
    ),
    Question(
        chapter=9,
        text="An H100 has 3.2 times the FLOP/s of an A100. Why does it reach a smaller share of "
        "its peak in the same matrix product?",
        choices={
            "a": "its kernels launch more slowly",
            "b": "shared memory and main memory have only about 1.7 times the bandwidth",
            "c": "bf16 is slower than fp16 on it",
        },
        answer="b",
        why=lambda: "Operands must come to the tensor cores; the formula's second and third term.",
        replies=(
            ("a", "A launch takes about as long on both, and large products hide it."),
            ("c", "Both have the same rate."),
        ),
    ),
)
