"""The questions of chapter 6; parlab computes the answers."""

import parlab as pl
from parlab.exercises.records import Question


def _peak(schedule):
    return max(pl.simulate(schedule).peak_in_flight)


def _groups():
    from parlab.exercises.layout import map_3d_job

    return map_3d_job(tp=8, dp=2, pp=4)


QUESTIONS = (
    Question(
        chapter=6,
        text="8 stages, 16 micro-batches, 1F1B: which fraction of the time is idle?",
        answer=lambda: float(pl.simulate(pl.one_f_one_b(8, 16)).idle_fraction),
        why=lambda: "(p-1)/(m+p-1) = 7/23.",
        replies=(
            (7 / 16, "That is idle over ideal time. The share of the run is smaller."),
            (8 / 23, "The first stage starts at once: p - 1 wait."),
            (16 / 23, "That is the busy share."),
        ),
    ),
    Question(
        chapter=6,
        text="How can you make that smaller without another global batch?",
        choices={
            "a": "more stages",
            "b": "fewer, larger micro-batches",
            "c": "several chunks of layers a rank, or more and smaller micro-batches",
            "d": "1F1B instead of GPipe",
        },
        answer="c",
        why=lambda: (
            "With 2 chunks a rank it is "
            f"{pl.pipeline_bubble(8, 16, 2):.1%}, with 32 micro-batches "
            f"{pl.pipeline_bubble(8, 32):.1%}. Fewer stages help as well."
        ),
        replies=(
            ("a", "Each further stage is one more that waits."),
            ("b", "Then each stage waits longer for the first of them."),
            ("d", "Both have the same bubble; 1F1B holds fewer activations."),
        ),
    ),
    Question(
        chapter=6,
        text="8 stages, 64 micro-batches: how many micro-batches does the first stage hold at "
        "most, under 1F1B?",
        tolerance=0,
        answer=lambda: _peak(pl.one_f_one_b(8, 64)),
        why=lambda: f"As many as there are stages. GPipe holds {_peak(pl.gpipe(8, 64))}.",
        replies=(
            (64, "That is GPipe, which runs all forwards first."),
            (7, "It is 7 forwards ahead, and takes one more before the first backward."),
            (1, "That is the last stage."),
        ),
    ),
    Question(
        chapter=6,
        text="4 stages, 8 micro-batches, interleaved with 2 chunks a rank: which fraction of the "
        "time is idle?",
        answer=lambda: float(pl.simulate(pl.interleaved_1f1b(4, 8, 2)).idle_fraction),
        why=lambda: f"3/19. Without chunks it is 3/11, {3 / 11:.1%}, less than twice as much.",
        replies=(
            (3 / 22, "Idle over total does not fall by v: the total gets shorter as well."),
            (3 / 16, "That is idle over ideal time."),
            (3 / 11, "That is without chunks."),
        ),
    ),
    Question(
        chapter=6,
        text="A tool reports a bubble of 187.5% for 16 stages and 8 micro-batches. What did it "
        "divide by?",
        choices={
            "a": "the total time",
            "b": "the time of the work alone",
            "c": "the number of stages",
        },
        answer="b",
        why=lambda: f"15/8. Of the run {pl.pipeline_bubble(16, 8):.1%} is idle, 15/23.",
        replies=(
            ("a", "A share of the total is below 100%."),
            ("c", "(p-1)/p would be below 100% as well."),
        ),
    ),
    Question(
        chapter=6,
        text="A job with tp = 8, dp = 2, pp = 4 on 8 nodes of 8 GPUs, ranks in the order tp, dp, "
        "pp: how many nodes does a data-parallel group touch?",
        tolerance=0,
        answer=lambda: _groups()[1]["dp"],
        why=lambda: f"Its ranks are 8 apart: rank 0 and rank {_groups()[0]['dp'][0][1]}.",
        replies=(
            (1, "Its two members are a stride of tp = 8 apart."),
            (8, "It has two members."),
            (4, "That is a pipeline group."),
        ),
    ),
)
