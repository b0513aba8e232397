"""The questions of chapter 7; parlab computes the answers."""

from math import exp

import parlab as pl
from parlab.exercises.records import Question


def _ring_mb(**changed):
    sizes = {"sequence": 65_536, "cp": 8, **changed}
    traffic = pl.context_parallel_traffic(pl.model("llama-3-8b"), 1, **sizes)
    return traffic.only(phase="forward").bytes_per_rank / 1e6


def _busiest(cp):
    return pl.causal_work(131_072, cp, balanced=False).imbalance


def _hidden_from(**changed):
    h100, wire = pl.gpu("h100-sxm"), pl.link("infiniband-400g")
    return pl.ring_hides_from(pl.model("llama-3-70b"), h100, wire, **changed)


QUESTIONS = (
    Question(
        chapter=7,
        text="What does sequence parallelism divide over the ranks that tensor parallelism leaves "
        "whole?",
        choices={
            "a": "what norms, attention and MLP read",
            "b": "keys and values",
            "c": "the weights of norms",
            "d": "the scores of attention",
        },
        answer="a",
        why=lambda: "Between the matrices a rank then has s/N tokens only, for the same bytes.",
        replies=(
            ("b", "Tensor parallelism divides them already, by heads."),
            ("c", "They stay whole on every rank, and their gradients must be summed."),
            ("d", "They are divided already, by heads, and a flash kernel keeps none."),
        ),
    ),
    Question(
        chapter=7,
        text="Llama 3 8B has 32 heads, 8 of keys and values, of size 128. 65,536 tokens on 8 ranks "
        "of a ring, bf16: how many MB does a rank send in one layer's forward?",
        unit="MB",
        answer=_ring_mb,
        why=lambda: (
            "7 hops of the keys and the values of 8192 tokens: 2 x 8192 x 8 x 128 x 2 bytes."
        ),
        replies=(
            (lambda: _ring_mb() * 8 / 7, "8 steps have 7 hops between them."),
            (lambda: _ring_mb() / 2, "Keys and values, two tensors."),
            (lambda: _ring_mb() * 4, "Only the 8 heads of keys and values travel."),
            (lambda: _ring_mb() * 3, "That is forward and backward."),
            (lambda: _ring_mb() / 7, "That is one hop; there are 7."),
            (lambda: _ring_mb() * 8, "Each rank has 1/8 of the tokens."),
        ),
    ),
    Question(
        chapter=7,
        text="A row has seen the largest score M = 2 and the sum l = 1.5. A block brings a score "
        "of 5. What is left of the old sum, before the block's own part is added?",
        tolerance=0.005,
        answer=lambda: 1.5 * exp(2 - 5),
        why=lambda: "1.5 e^(2-5): exponentials are now measured from 5.",
        replies=(
            (1.5, "It was measured from M = 2; now the largest score is 5."),
            (lambda: 1.5 * exp(3), "The other way: e^(old - new) is below 1."),
            (lambda: 1 + 1.5 * exp(-3), "That is with the block's own e^(5-5) = 1."),
        ),
    ),
    Question(
        chapter=7,
        text="A long causal sequence in 4 equal pieces, one a rank: the busiest rank's work over "
        "the mean?",
        answer=lambda: _busiest(4),
        why=lambda: "2 - 1/cp: the last rank sees almost everything, the mean is half of that.",
        replies=(
            (2, "That is the limit of many ranks."),
            (4, "The last rank does 7 of 16 parts, not all."),
            (lambda: _busiest(8), "That is for 8 ranks."),
            (1, "That is what the zigzag reaches."),
            (7, "7 times the first rank's work; over the mean?"),
        ),
    ),
    Question(
        chapter=7,
        text="64 heads, 8 of keys and values. H100s at 40% of 989.4 TFLOP/s, 50 GB/s a card, bf16, "
        "causal with a zigzag: from how many tokens a rank on does the ring hide in forward?",
        unit="tokens",
        answer=_hidden_from,
        why=lambda: "w (k/a) F/B = 2 x 8/64 x 395.8e12 / 50e9.",
        replies=(
            (lambda: 8 * _hidden_from(), "That is with keys of its own for each head."),
            (lambda: _hidden_from(causal=False), "In a causal step only half a block is computed."),
            (lambda: _hidden_from(efficiency=1.0), "At 40% of the peak compute takes longer."),
        ),
    ),
    Question(
        chapter=7,
        text="32 heads, 8 of keys and values, tensor parallelism of 2: over how many ranks can "
        "Ulysses cut the sequence without copies of heads?",
        tolerance=0,
        answer=lambda: pl.model("llama-3-8b").kv_heads // 2,
        why=lambda: "Each rank needs a whole key-value head, and tensor parallelism left 4.",
        replies=(
            (8, "Tensor parallelism has taken half of the heads already."),
            (16, "Queries have so many; there are fewer keys and values."),
            (32, "Queries have so many; there are fewer keys and values."),
        ),
    ),
)
