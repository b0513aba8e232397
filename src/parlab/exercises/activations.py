"""The exercise of chapter 5 on what a transformer's layers keep for backward."""

from parlab.exercises.records import Case, Exercise, Misconception
from parlab.published import published_table

FEW_ROUNDINGS = "a handful of multiplications and divisions of floats"


def activation_memory_bytes(
    layers,
    hidden,
    heads,
    sequence,
    micro_batch,
    tp=1,
    sequence_parallel=False,
    recompute="none",
):
    """Return the bytes of activations that a transformer's layers keep for backward.

    Per layer, in 16 bits with dropout, s the sequence, b the micro-batch, h hidden, a heads, t tp:

        10 sbh         whole on every rank, or 10 sbh / t with sequence_parallel
        24 sbh / t     inside attention and MLP
        5 a s^2 b / t  attention's scores; recompute="selective" does not keep them

    recompute="full" keeps only each layer's input, 2 sbh.

    >>> activation_memory_bytes(48, 6144, 64, 2048, 4, tp=8) / 2**30
    59.25
    """
    s, b, h, a, t = sequence, micro_batch, hidden, heads, tp
    if recompute == "full":
        return layers * 2 * s * b * h
    whole = 10 * s * b * h / (t if sequence_parallel else 1)
    inside = 24 * s * b * h / t
    scores = 5 * a * s * s * b / t if recompute == "none" else 0
    return layers * (whole + inside + scores)


# Tensors of a layer in units of sbh bytes, Korthikanti et al. (arXiv 2205.05198), section 4.1:
# those that tensor parallelism leaves whole, and those that it cuts.
_WHOLE = {
    "input of the first norm": 2,
    "input of attention": 2,
    "mask of the dropout after attention": 1,
    "input of the second norm": 2,
    "input of the MLP": 2,
    "mask of the dropout after the MLP": 1,
}
_CUT = {
    "queries and keys": 4,
    "values": 2,
    "output of attention": 2,
    "input of GeLU": 8,
    "input of the second matrix": 8,
}
# In units of a s^2 b bytes.
_SCORES = {"softmax": 2, "its dropout's mask": 1, "its dropout's output": 2}


def _expect_activations(L, h, a, s, b, t=1, sequence_parallel=False, recompute="none"):
    if recompute == "full":
        return float(sum(2 * s * b * h for _ in range(L)))
    kept = sum(_WHOLE.values()) / (t if sequence_parallel else 1) + sum(_CUT.values()) / t
    layer = kept * s * b * h
    if recompute == "none":
        layer += sum(_SCORES.values()) * a * s * s * b / t
    return L * layer


def _draw_activations(rng):
    t = int(rng.choice([1, 2, 4, 8]))
    a = t * int(rng.integers(1, 5))
    L, s, b = int(rng.integers(2, 20)), 256 * int(rng.integers(1, 9)), int(rng.integers(2, 5))
    recompute = str(rng.choice(["none", "selective", "full"]))
    cut = bool(rng.integers(0, 2)) and recompute != "full"
    return L, 64 * a, a, s, b, t, cut, recompute


def _published_cases():
    """The rows of figure 1 whose first stage keeps L layers' worth, as without chunks."""
    source = "Korthikanti et al., figure 1"
    for row in published_table("activation-memory").rows:
        if row["chunks"] == 1:
            size = row["layers"], row["hidden"], row["heads"], 2048, row["micro_batch"], 8
            yield Case(size, row["no_recompute_gib"] * 2**30, source)
            cut = row["sequence_parallel_selective_gib"] * 2**30
            yield Case((*size, True, "selective"), cut, source)


# Known mistakes.


def _activations(whole=10, cut=24, scores=5, full=2, layers=True, ranks=None):
    """A way with other constants in the three lines."""

    def compute(L, h, a, s, b, t=1, sequence_parallel=False, recompute="none"):
        t = ranks or t
        L = L if layers else 1
        if recompute == "full":
            return L * full * s * b * h
        kept = (whole / (t if sequence_parallel else 1) + cut / t) * s * b * h
        return L * (kept + (scores * a * s * s * b / t if recompute == "none" else 0))

    return compute


def _all_divided(L, h, a, s, b, t=1, sequence_parallel=False, recompute="none"):
    return _expect_activations(L, h, a, s, b, t, True, recompute)


def _never_divided(L, h, a, s, b, t=1, sequence_parallel=False, recompute="none"):
    return _expect_activations(L, h, a, s, b, t, False, recompute)


def _one_score_matrix(L, h, a, s, b, t=1, sequence_parallel=False, recompute="none"):
    without = _expect_activations(L, h, a, s, b, t, sequence_parallel, "selective")
    if recompute != "none":
        return _expect_activations(L, h, a, s, b, t, sequence_parallel, recompute)
    return without + L * 5 * s * s * b / t


def _scores_uncut(L, h, a, s, b, t=1, sequence_parallel=False, recompute="none"):
    right = _expect_activations(L, h, a, s, b, t, sequence_parallel, recompute)
    return right + (L * 5 * a * s * s * b * (1 - 1 / t) if recompute == "none" else 0)


def _no_recompute(L, h, a, s, b, t=1, sequence_parallel=False, recompute="none"):
    return _expect_activations(L, h, a, s, b, t, sequence_parallel)


def _full_cut(L, h, a, s, b, t=1, sequence_parallel=False, recompute="none"):
    right = _expect_activations(L, h, a, s, b, t, sequence_parallel, recompute)
    return right / t if recompute == "full" else right


ACTIVATION_MEMORY = Exercise(
    chapter=5,
    solution=activation_memory_bytes,
    expect=_expect_activations,
    route="tensors listed one by one",
    draw=_draw_activations,
    cases=(
        Case((1, 4, 1, 2, 1), 34 * 8 + 5 * 4.0, "34 sbh + 5 a s^2 b, by hand"),
        Case((2, 4, 1, 2, 1, 1, False, "full"), 2 * 2 * 8.0, "2 sbh a layer, by hand"),
        *_published_cases(),
    ),
    misconceptions=(
        Misconception(
            "tensor parallelism divides everything",
            (_all_divided,),
            "10 sbh a layer, around norms and dropout, stay whole on every rank. Only sequence "
            "parallelism cuts them.",
            "Which of the three lines in the docstring has no t?",
        ),
        Misconception(
            "sequence parallelism is not used",
            (_never_divided,),
            "It cuts the 10 sbh around norms and dropout over the ranks too.",
            "Where does your function use sequence_parallel?",
        ),
        Misconception(
            "tensor parallelism is not used",
            (_activations(ranks=1),),
            "Attention and MLP are cut over the ranks, and so is what they keep.",
            "Where does your function use tp?",
        ),
        Misconception(
            "attention's scores are forgotten",
            (_activations(scores=0),),
            "A softmax over all pairs of tokens keeps 5 a s^2 b bytes. At GPT-3's size that is 80 "
            "sbh beside the 34.",
            "Which tensors of a layer have s twice in their shape?",
        ),
        Misconception(
            "one matrix of scores for all heads",
            (_one_score_matrix,),
            "Every head has scores of its own.",
            "Which letter of the third line is missing?",
        ),
        Misconception(
            "the scores are not cut",
            (_scores_uncut,),
            "Heads are dealt out over the ranks, and each rank keeps the scores of its own.",
            "How many heads does one rank have?",
        ),
        Misconception(
            "full recomputation keeps nothing",
            (_activations(full=0),),
            "A layer can be computed again only from its input, 2 sbh.",
            "What does the second forward of a layer start from?",
        ),
        Misconception(
            "full recomputation keeps a cut input",
            (_full_cut,),
            "Between layers the activation is whole on every rank.",
            "Is the input of a layer cut by tensor parallelism?",
        ),
        Misconception(
            "recomputation is not used",
            (_no_recompute,),
            "selective drops the scores, full all but the layer's input.",
            "Where does your function use recompute?",
        ),
        Misconception(
            "one layer instead of all",
            (_activations(layers=False),),
            "Backward comes to a layer after forward has passed them all.",
            "How many layers hold their activations at the end of forward?",
        ),
    ),
    tolerance=1e-9,
    why_tolerance=FEW_ROUNDINGS,
)

EXERCISES = (ACTIVATION_MEMORY,)
