"""Exercises of chapter 4 on what has to be counted before anything is divided: parameters."""

from fractions import Fraction
from math import prod

from parlab.exercises.memory_states import FEW_ROUNDINGS
from parlab.exercises.records import Case, Exercise, Misconception


def gpt_params(layers, hidden, vocab, positions, tied):
    """Return the number of parameters of a GPT-2.

    Embeddings of `vocab` tokens and of `positions`. In each layer query, key, value and output
    matrices of h x h and an MLP from h to 4h and back, all with biases, and two norms with weight
    and bias. After the last layer one more norm, and a head from h to vocab without a bias, which,
    if `tied`, is the token embedding's matrix.

    >>> gpt_params(12, 768, 50257, 1024, tied=True)
    124439808
    """
    h = hidden
    attention, mlp, norm = 4 * (h * h + h), 8 * h * h + 5 * h, 2 * h
    heads = 1 if tied else 2
    return layers * (attention + mlp + 2 * norm) + norm + (heads * vocab + positions) * h


def moe_zero1_bytes(shared_params, expert_params, experts, per_token, n_gpus, ep):
    """Return the bytes of model states on one GPU of a model with experts, under ZeRO 1.

    2 bytes a parameter of weights, 2 of gradients and 12 of optimizer, which ZeRO cuts over the
    GPUs that hold the same parameters. Expert parallelism gives each GPU experts / ep of the
    experts; all of them hold the shared parameters.

    expert_params: of one expert, in all layers together. per_token: how many experts a token
    visits. ep divides the experts and n_gpus.

    >>> moe_zero1_bytes(1605636096, 5637144576, 8, 2, 64, 8) / 1e9  # Mixtral 8x7B
    37.72789632
    """
    own = experts // ep * expert_params
    same = n_gpus // ep
    return 4 * (shared_params + own) + 12 * (shared_params / n_gpus + own / same)


# Independent routes: matrix by matrix, and expert by expert.


def _shapes(layers, h, vocab, positions, tied):
    yield from [(vocab, h), (positions, h), (h,), (h,)]
    for _ in range(layers):
        yield from [(h, h), (h,)] * 4
        yield from [(h, 4 * h), (4 * h,), (4 * h, h), (h,)]
        yield from [(h,), (h,)] * 2
    if not tied:
        yield h, vocab


def _expect_params(*args):
    return sum(map(prod, _shapes(*args)))


def _draw_params(rng):
    layers, h, vocab, positions = (int(rng.integers(2, most)) for most in (9, 70, 999, 500))
    return layers, h, vocab, positions, bool(rng.integers(2))


def _expect_moe(shared, expert, experts, per_token, n_gpus, ep):
    """On GPU 0; GPU g holds the experts e with e % ep == g % ep."""
    total = shared * (4 + Fraction(12, n_gpus))
    for e in range(experts):
        holders = [gpu for gpu in range(n_gpus) if gpu % ep == e % ep]
        if 0 in holders:
            total += expert * (4 + Fraction(12, len(holders)))
    return float(total)


def _draw_moe(rng):
    ep, times, replicas = (int(size) for size in rng.integers(2, 6, 3))
    shared, expert = (int(rng.integers(1, 999)) * 10**6 for _ in range(2))
    return shared, expert, ep * times, int(rng.integers(1, ep)), ep * replicas, ep


# Known mistakes.


def _more(formula):
    """The right number, and formula(layers, h, vocab, positions, tied) on top."""
    return lambda *args: _expect_params(*args) + formula(*args)


GPT_PARAMS = Exercise(
    chapter=4,
    solution=gpt_params,
    expect=_expect_params,
    route="shapes of all matrices and vectors, one by one",
    draw=_draw_params,
    cases=(
        Case((12, 768, 50257, 1024, True), 124439808, "GPT-2 as published"),
        Case((1, 1, 2, 1, True), 30, "2 + 1 + 8 + 13 + 4 + 2, by hand"),
        Case((1, 1, 2, 1, False), 32, "with a head of its own, by hand"),
    ),
    misconceptions=(
        Misconception(
            "a tied weight counts twice",
            (_more(lambda L, h, vocab, positions, tied: vocab * h * tied),),
            "Embedding and head are one matrix in memory, with one gradient and one optimizer "
            "state. GPT-2 would have 163 million parameters.",
            "How many tensors does the program allocate?",
        ),
        Misconception(
            "a head of its own is forgotten",
            (_more(lambda L, h, vocab, positions, tied: -vocab * h * (not tied)),),
            "Where the head is not tied it is a second matrix as large as the embedding.",
            "What does the last layer multiply by, if not by the embedding?",
        ),
        Misconception(
            "positions are forgotten",
            (_more(lambda L, h, vocab, positions, tied: -positions * h),),
            "GPT-2 learns an embedding for each position.",
            "What is added to a token's embedding?",
        ),
        Misconception(
            "12 h^2 a layer: no biases and norms",
            (
                lambda L, h, vocab, positions, tied: (
                    12 * L * h * h + (vocab * (2 - tied) + positions) * h
                ),
                lambda L, h, vocab, positions, tied: (
                    12 * L * h * h + 2 * h + (vocab * (2 - tied) + positions) * h
                ),
            ),
            "A good estimate, and 13 h a layer below the number: biases and norms are few, but a "
            "checkpoint has them.",
            "Which vectors of h or 4h numbers does a layer have?",
        ),
        Misconception(
            "the final norm is forgotten",
            (_more(lambda L, h, vocab, positions, tied: -2 * h),),
            "There is one more norm between the last layer and the head.",
            "What happens to the last layer's output?",
        ),
        Misconception(
            "attention without its output matrix",
            (
                _more(lambda L, h, vocab, positions, tied: -L * (h * h + h)),
                _more(lambda L, h, vocab, positions, tied: -L * h * h),
            ),
            "Query, key and value are three; the fourth mixes what the heads have found.",
            "Which matrix follows the attention's weighted sum?",
        ),
    ),
)

MOE_ZERO1 = Exercise(
    chapter=4,
    solution=moe_zero1_bytes,
    expect=_expect_moe,
    route="expert by expert, with the GPUs that hold it",
    draw=_draw_moe,
    cases=(
        Case(
            (1605636096, 5637144576, 8, 2, 64, 8),
            37727896320.0,
            "Mixtral 8x7B on 64 GPUs: aiconfigurator PR 1390",
        ),
        Case((0, 1, 2, 1, 4, 2), 10.0, "one expert on two GPUs: 4 + 12 / 2"),
    ),
    misconceptions=(
        Misconception(
            "only the experts that a token visits count",
            (lambda shared, e, n_e, k, n, ep: _expect_moe(shared, e * k / n_e, n_e, k, n, ep),),
            "Another token visits others, so all lie in memory: Mixtral computes with 12.9 billion "
            "parameters and holds 46.7.",
            "Where is an expert that this token does not visit?",
        ),
        Misconception(
            "expert states are cut over all GPUs",
            (lambda shared, e, n_e, k, n, ep: 4 * (s := shared + n_e // ep * e) + 12 * s / n,),
            "Only n / ep GPUs hold the same experts; the others have nothing to cut. For Mixtral "
            "on 64 GPUs this gives 30.33 GB for 37.73.",
            "How many GPUs hold expert 0?",
        ),
        Misconception(
            "every GPU holds all experts",
            (lambda shared, e, n_e, k, n, ep: (4 + 12 / n) * (shared + n_e * e),),
            "Expert parallelism leaves experts / ep of them to each GPU.",
            "How many experts does a GPU hold?",
        ),
        Misconception(
            "expert states are not cut at all",
            (lambda shared, e, n_e, k, n, ep: 4 * shared + 12 * shared / n + 16 * (n_e // ep) * e,),
            "The n / ep GPUs with the same experts are data-parallel replicas of them, and share "
            "their states out.",
            "How many GPUs hold expert 0?",
        ),
        Misconception(
            "shared parameters are divided by ep too",
            (lambda shared, e, n_e, k, n, ep: _expect_moe(shared / ep, e, n_e, k, n, ep),),
            "Attention, embeddings and norms are no experts: each GPU holds them whole.",
            "Which parameters does every token visit?",
        ),
    ),
    tolerance=1e-9,
    why_tolerance=FEW_ROUNDINGS,
)

EXERCISES = (GPT_PARAMS, MOE_ZERO1)
