"""Exercises of chapter 2: averages over ranks, of gradients and of losses with token counts."""

import numpy as np

from parlab.exercises.data_parallel import DROPPED, ORDER_OF_SUMS, SUMMED, TWICE
from parlab.exercises.records import Case, Exercise, Misconception


def average_gradients(grads):
    """Return the mean over ranks of their gradients, as floats.

    grads: one array per rank, all of one shape, of floats or of integers.

    >>> average_gradients([np.array([3, 10]), np.array([4, 20])]).tolist()
    [3.5, 15.0]
    """
    return np.mean(np.stack(grads).astype(float), axis=0)


def token_weighted_mean(losses, tokens):
    """Return the mean loss per token, over all ranks and micro-batches.

    losses: for each rank a list with the mean loss of each of its micro-batches.
    tokens: for each rank a list with the number of tokens behind each of these means.

    >>> token_weighted_mean([[1.0], [4.0]], [[2], [8]])
    3.4
    """
    total = count = 0
    for rank_losses, rank_tokens in zip(losses, tokens, strict=True):
        for loss, n in zip(rank_losses, rank_tokens, strict=True):
            total += loss * n
            count += n
    return total / count


# Independent routes.


def _expect_average(grads):
    entries = zip(*(grad.ravel().tolist() for grad in grads), strict=True)
    return np.array([sum(column) / len(grads) for column in entries]).reshape(grads[0].shape)


def _expect_token_mean(losses, tokens):
    every_token = [
        loss
        for rank_losses, rank_tokens in zip(losses, tokens, strict=True)
        for loss, n in zip(rank_losses, rank_tokens, strict=True)
        for _ in range(n)
    ]
    return sum(every_token) / len(every_token)


def _draw_grads(rng):
    n, size = int(rng.integers(3, 6)), int(rng.integers(2, 6))
    if rng.random() < 0.5:
        return ([rng.integers(-20, 20, size) for _ in range(n)],)
    return ([rng.normal(size=size).round(2) for _ in range(n)],)


def _draw_losses(rng):
    n, micro_batches = int(rng.integers(2, 5)), int(rng.integers(1, 4))
    losses = [rng.uniform(0.5, 4, micro_batches).round(2).tolist() for _ in range(n)]
    return losses, [rng.integers(1, 30, micro_batches).tolist() for _ in range(n)]


# Known mistakes.


def _of_grads(combine):
    return lambda grads: combine(np.stack(grads).astype(float), len(grads))


def _floor_of_integers(grads):
    mean = _expect_average(grads)
    return np.floor(mean) if grads[0].dtype.kind == "i" else mean


def _one_after_the_other(g, n):
    mean = g[0]
    for other in g[1:]:
        mean = (mean + other) / 2
    return mean


AVERAGE_GRADIENTS = Exercise(
    chapter=2,
    solution=average_gradients,
    expect=_expect_average,
    route="entry by entry, in plain Python",
    draw=_draw_grads,
    cases=(
        Case(([np.array([3]), np.array([4])],), np.array([3.5]), "torchcomms PR 287"),
        Case(([np.arange(6.0).reshape(2, 3)] * 3,), np.arange(6.0).reshape(2, 3), "equal ranks"),
    ),
    misconceptions=(
        Misconception(
            "the mean of integers stays an integer",
            (
                lambda grads: sum(grads) // len(grads),
                _floor_of_integers,
                lambda grads: _expect_average(grads).astype(grads[0].dtype),
            ),
            "The mean of 3 and 4 is 3.5. In an integer type the fraction is cut off, without a "
            "word.",
            "Which dtype does your division leave?",
        ),
        Misconception(
            "averaged one after the other",
            (_of_grads(_one_after_the_other),),
            "(a + b) / 2, then with c again / 2, gives c half of all the weight and a a quarter.",
            "Add up first; divide once.",
        ),
        Misconception(
            "summed, not averaged",
            (_of_grads(lambda g, n: g.sum(0)),),
            SUMMED.reason,
            SUMMED.hint,
        ),
        Misconception(
            "divided twice",
            (_of_grads(lambda g, n: g.mean(0) / n),),
            "The mean over ranks divides by N once: an all-reduce that averages has done it.",
            "Count the divisions.",
        ),
        Misconception(
            DROPPED,
            (
                _of_grads(lambda g, n: g[:-1].sum(0) / n),
                _of_grads(lambda g, n: g[1:].sum(0) / n),
                _of_grads(lambda g, n: g[:-1].mean(0)),
                _of_grads(lambda g, n: g[1:].mean(0)),
            ),
            "The first or the last rank has no say in the step, and its data none in the model.",
            "Check both ends of your loop over the ranks.",
        ),
        Misconception(
            TWICE,
            (
                _of_grads(lambda g, n: (g.sum(0) + g[0]) / n),
                _of_grads(lambda g, n: (g.sum(0) + g[-1]) / n),
                _of_grads(lambda g, n: (g.sum(0) + g[0]) / (n + 1)),
                _of_grads(lambda g, n: (g.sum(0) + g[-1]) / (n + 1)),
            ),
            "One rank weighs double: often it is both the start of a sum and a part of it.",
            "What does your sum start from?",
        ),
    ),
    tolerance=1e-9,
    why_tolerance=ORDER_OF_SUMS,
)


def _means(losses, tokens):
    return [
        _expect_token_mean([mine], [counts]) for mine, counts in zip(losses, tokens, strict=True)
    ]


def _scaled(factor):
    return lambda losses, tokens: _expect_token_mean(losses, tokens) * factor(losses)


TOKEN_WEIGHTED_MEAN = Exercise(
    chapter=2,
    solution=token_weighted_mean,
    expect=_expect_token_mean,
    route="every token with its loss, one by one",
    draw=_draw_losses,
    cases=(
        Case(([[1.0], [4.0]], [[2], [8]]), 3.4, "NeMo Automodel 3846"),
        Case(([[1.0, 2.0], [3.0, 4.0]], [[3, 1], [5, 2]]), 28 / 11, "NeMo Automodel 3846"),
    ),
    misconceptions=(
        Misconception(
            "the mean of all means",
            (lambda losses, tokens: float(np.mean(losses)),),
            "A micro-batch with few tokens then counts as much as one with many: each of its "
            "tokens weighs more.",
            "Go back from each mean to its sum over tokens.",
        ),
        Misconception(
            "the token mean on each rank, then the mean over ranks",
            (lambda losses, tokens: float(np.mean(_means(losses, tokens))),),
            "Right inside a rank, wrong between them: ranks have different numbers of tokens.",
            "All-reduce two numbers, the summed loss and the token count, and divide after that.",
        ),
        Misconception(
            "meant for an average over ranks, but summed",
            (_scaled(len),),
            "Off by exactly the number of ranks N.",
            "The global token count is all that is divided by.",
        ),
        Misconception(
            "divided by all tokens, then averaged over ranks",
            (_scaled(lambda losses: 1 / len(losses)),),
            "DDP divides by N after you have divided by all tokens: exactly N times too small.",
            "Divide once: multiply by N if somebody else will divide by N.",
        ),
        Misconception(
            "divided by all tokens, then averaged over ranks and micro-batches",
            (_scaled(lambda losses: 1 / sum(map(len, losses))),),
            "Off by exactly the ranks times the accumulation steps, N A.",
            "Divide once, by the number of all tokens.",
        ),
        Misconception(
            "means are taken for sums",
            (lambda losses, tokens: sum(map(sum, losses)) / sum(map(sum, tokens)),),
            "A mean over n tokens stands for n of them: it must be multiplied by n before it is "
            "added.",
            "What is the summed loss of a micro-batch with mean 2 and 3 tokens?",
        ),
    ),
    tolerance=1e-9,
    why_tolerance=ORDER_OF_SUMS,
)

EXERCISES = (AVERAGE_GRADIENTS, TOKEN_WEIGHTED_MEAN)
