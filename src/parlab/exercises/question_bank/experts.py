"""The questions of chapter 8; parlab computes the answers."""

import parlab as pl
from parlab.exercises.records import Question
from parlab.units import GB


def _mixtral_gb(expert_parallel):
    mixtral = pl.model("mixtral-8x7b")
    return pl.expert_zero_memory_bytes(mixtral, 64, 1, expert_parallel=expert_parallel) / GB


def _dispatch_mb():
    traffic = pl.expert_parallel_traffic(pl.model("mixtral-8x7b"), 2, sequence=4096, ep=8)
    return traffic.items[0].bytes_per_rank / 1e6


QUESTIONS = (
    Question(
        chapter=8,
        text="Mixtral-8x7B (46.7e9 parameters, 45.1e9 of them in experts) on 64 GPUs, expert "
        "parallelism of 8, ZeRO-1: how many GB of model states has a GPU?",
        unit="GB",
        tolerance=0.005,
        answer=lambda: _mixtral_gb(8),
        why=lambda: (
            "4 bytes for each of 7.24e9 parameters, and 12 for 1/64 of the shared ones and for "
            "1/8 of a rank's experts: only 8 ranks have the same."
        ),
        replies=(
            (30.33, "A rank's experts have 8 replicas, not 64: only these share their states."),
            (lambda: _mixtral_gb(1), "That is with all experts on every GPU."),
            (
                lambda: pl.zero_memory_bytes(pl.model("mixtral-8x7b").n_active_params, 64, 1) / GB,
                "All experts are stored, also those that a token does not visit.",
            ),
        ),
    ),
    Question(
        chapter=8,
        text="h = 4096, 8192 tokens a GPU, 2 of 8 experts for each, expert parallelism of 8, bf16, "
        "even routing: how many MB does a GPU send in one dispatch?",
        unit="MB",
        answer=_dispatch_mb,
        why=lambda: "8192 x 2 copies of 4096 x 2 bytes, of which 7/8 go to other ranks.",
        replies=(
            (lambda: _dispatch_mb() * 8 / 7, "One copy of eight is for an expert at home."),
            (lambda: _dispatch_mb() / 2, "Each token goes to two experts."),
            (lambda: _dispatch_mb() * 4, "That is all four all-to-alls of a layer."),
            (lambda: _dispatch_mb() * 2, "bf16 has 2 bytes; or you counted the way back too."),
        ),
    ),
    Question(
        chapter=8,
        text="On a given card, link and group, what decides how long the all-to-alls take beside "
        "the experts' own compute?",
        choices={
            "a": "the hidden size h",
            "b": "the number of experts that a token visits",
            "c": "the width f of one expert",
            "d": "the number of tokens",
        },
        answer="c",
        why=lambda: "A copy is h numbers and takes FLOP in proportion to h f: the rest cancels.",
        replies=(
            ("a", "Bytes and FLOP both grow with h."),
            ("b", "Each visit costs its bytes and its FLOP."),
            ("d", "Both grow with it, latency apart."),
        ),
    ),
    Question(
        chapter=8,
        text="8 ranks in 2 groups of ep = 4. Each expert's gradient is averaged over the 2 ranks "
        "that hold it. By which factor is it too large?",
        tolerance=0,
        answer=lambda: 4,
        why=lambda: (
            "The all-to-all of backward has summed over 4 ranks already, so the sum has 8 ranks in "
            "it and was divided by 2."
        ),
        replies=(
            (1, "That would be right if each rank had sent its experts its own tokens only."),
            (8, "It was divided by 2."),
            (2, "That is the number of replicas, by which it was divided."),
            (0.25, "Too large, not too small: it sums over more ranks than it is divided by."),
        ),
    ),
    Question(
        chapter=8,
        text="1024 tokens visit 2 of 8 experts each, with a capacity factor of 1.25. For how many "
        "copies does an expert have room?",
        tolerance=0,
        answer=lambda: pl.expert_capacity(1024, 8, 2, 1.25),
        why=lambda: "1.25 x 1024 x 2 / 8.",
        replies=(
            (160, "Each token brings two copies."),
            (256, "That is the mean; the factor leaves a quarter more room."),
            (1280, "That is for all tokens at one expert; they spread over 8."),
        ),
    ),
    Question(
        chapter=8,
        text="Four ranks of experts get 30, 10, 10 and 10 copies. By which factor does the layer "
        "take longer than with even routing?",
        answer=lambda: pl.imbalance([30, 10, 10, 10]),
        why=lambda: "It waits for the busiest: 30 over the mean of 15.",
        replies=(
            (3, "With even routing each would get 15, not 10."),
            (1.5, "30 over what? The mean of the four is 15."),
            (1, "The sum is the same, but all wait for the busiest rank."),
        ),
    ),
)
