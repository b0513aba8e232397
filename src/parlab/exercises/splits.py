"""Exercises of chapters 4 and 6 on cuts that do not come out even: nothing may be lost."""

from parlab.exercises.records import Case, Exercise, Misconception


def dim0_shards(rows, n_gpus):
    """Return the rows of a weight that each GPU holds, as PyTorch's fully_shard cuts it.

    Every GPU takes ceil(rows / N) rows until none are left, so the last ones may get fewer or none.

    >>> dim0_shards(10, 8)
    [2, 2, 2, 2, 2, 0, 0, 0]
    """
    chunk = -(-rows // n_gpus)
    return [min(chunk, max(rows - gpu * chunk, 0)) for gpu in range(n_gpus)]


def split_layers(layers, stages):
    """Return how many layers each pipeline stage has: as even as can be, the larger ones first.

    >>> split_layers(30, 4)
    [8, 8, 7, 7]
    """
    whole, rest = divmod(layers, stages)
    return [whole + (stage < rest) for stage in range(stages)]


# Independent routes: rows and layers dealt out one by one.


def _expect_shards(rows, n_gpus):
    chunk = 1
    while chunk * n_gpus < rows:
        chunk += 1
    held = [0] * n_gpus
    for row in range(rows):
        held[row // chunk] += 1
    return held


def _expect_layers(layers, stages):
    held = [0] * stages
    for layer in range(layers):
        held[layer % stages] += 1
    return held


def _draw(rng):
    return int(rng.integers(1, 50)), int(rng.integers(2, 13))


# Known mistakes.


def _whole_only(n, parts):
    return [n // parts] * parts


def _rest_to_the_last(n, parts):
    return [n // parts] * (parts - 1) + [n - n // parts * (parts - 1)]


def _rounded_up(n, parts):
    return [-(-n // parts)] * parts


def _larger_last(n, parts):
    return _expect_layers(n, parts)[::-1]


REMAINDER = Misconception(
    "the remainder is dropped",
    (_whole_only,),
    "What is left over after equal shares belongs to somebody: a model without its last layers "
    "trains, and is another model.",
    "Do your shares add up?",
)
REST_TO_THE_LAST = Misconception(
    "the last one takes all of the remainder",
    (_rest_to_the_last,),
    "Nothing is lost, but the last one has up to twice as much as the others, who wait for it.",
    "How far apart may two shares be?",
)
ROUNDED_UP = Misconception(
    "every share is rounded up",
    (_rounded_up,),
    "The shares then add up to more than there is.",
    "Do your shares add up?",
)

DIM0_SHARDS = Exercise(
    chapter=4,
    solution=dim0_shards,
    expect=_expect_shards,
    route="rows dealt out one by one",
    draw=_draw,
    cases=(
        Case((10, 8), [2, 2, 2, 2, 2, 0, 0, 0], "pytorch PR 117877"),
        Case((1, 3), [1, 0, 0], "by hand"),
        Case((6, 3), [2, 2, 2], "by hand"),
    ),
    misconceptions=(
        Misconception(
            "as even as can be",
            (_expect_layers,),
            "That is np.array_split. fully_shard rounds the share up, so that all chunks before "
            "the last are equal: 10 rows on 8 GPUs leave three of them empty, and the fullest has "
            "20%, not 12.5%.",
            "How many rows does the first GPU take?",
        ),
        REMAINDER,
        REST_TO_THE_LAST,
        ROUNDED_UP,
    ),
)

SPLIT_LAYERS = Exercise(
    chapter=6,
    solution=split_layers,
    expect=_expect_layers,
    route="layers dealt out one by one",
    draw=_draw,
    cases=(
        Case((30, 4), [8, 8, 7, 7], "Megatron-LM 1304"),
        Case((10, 3), [4, 3, 3], "libai PR 225"),
        Case((2, 3), [1, 1, 0], "by hand"),
    ),
    misconceptions=(
        REMAINDER,
        REST_TO_THE_LAST,
        ROUNDED_UP,
        Misconception(
            "every stage but the last is rounded up",
            (_expect_shards,),
            "Nothing is lost, but the last stages may be nearly empty, and all wait for the first.",
            "How far apart may two shares be?",
        ),
        Misconception(
            "the larger stages come last",
            (_larger_last,),
            "As even, but the last stage has the head and the loss to compute besides.",
            "Which stages get one more?",
        ),
    ),
)

EXERCISES = (DIM0_SHARDS, SPLIT_LAYERS)
