"""The questions of chapter 3; parlab computes the answers."""

import parlab as pl
from parlab.exercises.records import Question

_EXAMPLE = {"hidden": 4096, "sequence": 4096, "micro_batch": 1, "tp": 8}


def _layer(link="nvlink-4", **more):
    wire = pl.Link(0, pl.link(link).bandwidth_bytes_per_s)
    return pl.tensor_parallel_traffic(**_EXAMPLE, link=wire, **more)


QUESTIONS = (
    Question(
        chapter=3,
        text="Why is the first matrix of the MLP cut by columns and the second by rows?",
        choices={
            "a": "because the first matrix is wider than tall",
            "b": "columns leave complete entries for GeLU, and just the inputs that the rows need",
            "c": "because rows of the first matrix would not fit on a GPU",
            "d": "the other order works as well",
        },
        answer="b",
        why=lambda: (
            "One all-reduce is left. The other order has partial sums before GeLU, and gelu(1) + "
            f"gelu(1) is {2 * pl.gelu(1.0):.2f}, gelu(2) {pl.gelu(2.0):.2f}."
        ),
        replies=(
            ("a", "The shapes do not decide it. What does GeLU need?"),
            ("c", "Both cuts leave 1/n of the matrix on a GPU."),
            ("d", "It needs an all-reduce before GeLU, which cannot act on partial sums."),
        ),
    ),
    Question(
        chapter=3,
        text="Why does tensor parallelism usually stay inside a node, while data parallelism spans "
        "nodes?",
        choices={
            "a": "it sends more bytes in a step",
            "b": "its all-reduces are waited for, several a layer; data parallelism's overlap",
            "c": "nodes have different weights",
            "d": "InfiniBand cannot all-reduce activations",
        },
        answer="b",
        why=lambda: (
            f"Per micro-batch of the chapter's example: {1e3 * _layer(n_layers=32).seconds:.0f} ms "
            f"over NVLink, {1e3 * _layer('infiniband-400g', n_layers=32).seconds:.0f} ms over one "
            "InfiniBand port."
        ),
        replies=(
            ("a", "It may send fewer. When are they sent, and who waits?"),
            ("c", "Tensor-parallel ranks always have different weights."),
            ("d", "It can. How long does it take?"),
        ),
    ),
    Question(
        chapter=3,
        text="A layer's forward and backward with full activation checkpointing: how many "
        "all-reduces?",
        tolerance=0,
        answer=lambda: _layer(recompute=True).count,
        why=lambda: f"{_layer().count} without: the second forward has its two as well.",
        replies=(
            (4, "That is without recomputation: two in forward, two in backward."),
            (2, "Attention and MLP have one each, in forward and in backward."),
            (8, "Only the forward runs a second time."),
        ),
    ),
    Question(
        chapter=3,
        text="A bias is added on each of 8 tensor-parallel ranks before the all-reduce of a "
        "row-parallel layer. How often is it in the result?",
        tolerance=0,
        answer=lambda: sum(float(pl.row_parallel([[0]], [[[0]]], [1])[0]) for _ in range(8)),
        why=lambda: "Add it after the sum, or on one rank.",
        replies=((1, "The all-reduce adds up what each rank has, its bias included."),),
    ),
    Question(
        chapter=3,
        text="A column-parallel layer whose output stays split: what does it communicate?",
        choices={
            "a": "nothing at all",
            "b": "nothing in forward, an all-reduce of the input's gradient in backward",
            "c": "an all-gather in forward, nothing in backward",
            "d": "an all-reduce in forward and in backward",
        },
        answer="b",
        why=lambda: "Each rank's share of the gradient of x is a partial sum.",
        replies=(
            ("a", "In forward. What does each rank know of the gradient of x?"),
            ("c", "The gather is needed only if somebody wants the output whole."),
            ("d", "In forward every rank has complete columns."),
        ),
    ),
)
