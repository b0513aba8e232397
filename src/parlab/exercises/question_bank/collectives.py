"""The questions of chapter 1; parlab computes the answers."""

import parlab as pl
from parlab.exercises.records import Question
from parlab.units import GB


def _ring(n):
    return pl.all_reduce_cost(n, 1e9, pl.Link(0, 1))


def _ring_gb(n):
    return _ring(n).bytes_per_rank / GB


def _leaving(schedule, local=8):
    """Bytes that leave each node, in units of S."""
    return pl.bytes_leaving_nodes(schedule, 1, local)[0] / schedule.n_chunks


QUESTIONS = (
    Question(
        chapter=1,
        text="A ring all-reduce of 1 GB on 8 GPUs: how many GB does each GPU send?",
        unit="GB",
        answer=lambda: _ring_gb(8),
        why=lambda: "2 (N-1)/N S: two phases of 7 steps, each with an eighth of the buffer.",
        replies=(
            (2, "That is the limit for many GPUs. A rank keeps one of its N chunks in each phase."),
            (0.875, "That is one phase. After the reduce-scatter comes the all-gather."),
            (14, "14 steps it is, but each moves one chunk of 1/8 GB."),
            (3.5, "Sent or received, not both together."),
            (7, "Gathering on one rank would bring that much to it; a ring spreads it."),
        ),
    ),
    Question(
        chapter=1,
        text="The same 1 GB on 64 GPUs: how many GB does each GPU send?",
        unit="GB",
        tolerance=0.002,
        answer=lambda: _ring_gb(64),
        why=lambda: f"With 8 GPUs it was {_ring_gb(8):.2f}: it nears 2 S and never reaches it.",
        replies=(
            (lambda: 8 * _ring_gb(8), "More GPUs make the chunks smaller, not the traffic larger."),
            (2, "Near, but a rank keeps one chunk of 1/64 in each phase."),
        ),
    ),
    Question(
        chapter=1,
        text="What does grow with the number of GPUs in a ring all-reduce of a fixed size?",
        choices={
            "a": "the bytes that each GPU sends",
            "b": "the number of steps, and with it the latency",
            "c": "the size of one message",
            "d": "nothing",
        },
        answer="b",
        why=lambda: f"{_ring(8).steps} steps for 8 GPUs, {_ring(64).steps} for 64.",
        replies=(
            ("a", "They are 2 (N-1)/N S: from 1.75 to 1.97 GB, near their limit of 2 S."),
            ("c", "A message is one chunk, S/N: it shrinks."),
            ("d", "Every step waits for the one before it. How many are there?"),
        ),
    ),
    Question(
        chapter=1,
        text="1 MB on 8 GPUs, 5 µs a message, 50 GB/s: ring or pipelined tree?",
        choices={"a": "the ring is faster", "b": "the tree is faster", "c": "equally fast"},
        answer="b",
        why=lambda: (
            "The ring wins only above "
            + pl.format_bytes(pl.ring_tree_crossover_bytes(8, pl.Link(5e-6, 50e9)))
            + "; below, its 14 start-ups cost more than the tree's 6."
        ),
        replies=(
            ("a", "Compare 14 times 5 µs with the time for the bytes, about 35 µs."),
            ("c", "There is one size at which they are equal. Is it 1 MB?"),
        ),
    ),
    Question(
        chapter=1,
        text="2 nodes of 8 GPUs, a flat ring over all 16: how many S leave each node?",
        unit="S",
        answer=lambda: _leaving(pl.ring_all_reduce_schedule(16)),
        why=lambda: (
            f"In three stages it is {_leaving(pl.hierarchical_schedule(2, 8)):g} S, and spread "
            "over 8 network cards."
        ),
        replies=(
            (1, "That is the all-reduce in three stages, on 2 nodes."),
            (15, "Only one of the 8 GPUs has its right neighbour in the other node."),
            (30, "Only one of the 8 GPUs has its right neighbour in the other node."),
        ),
    ),
)
