"""The exercise of chapter 5 on the smallest cluster on which a model fits."""

import math

from parlab.exercises.records import Case, Exercise, Misconception


def nodes_needed(n_params, activation_bytes, card_bytes=80e9, gpus_per_node=8):
    """Return the smallest number of nodes on which a model trains under ZeRO stage 3.

    Each card holds its share of 16 bytes a parameter, and its own activation_bytes, which do not
    shrink with the number of cards. Return None where the activations alone fill a card.

    >>> nodes_needed(70e9, 5.4e9)  # 1,120 GB of states, 74.6 GB left on a card: 16 cards
    2
    """
    room = card_bytes - activation_bytes
    if room <= 0:
        return None
    return math.ceil(16 * n_params / (room * gpus_per_node))


def _expect_nodes(n_params, activation_bytes, card_bytes=80e9, gpus_per_node=8):
    if activation_bytes >= card_bytes:
        return None
    nodes = 1
    while 16 * n_params > nodes * gpus_per_node * (card_bytes - activation_bytes):
        nodes += 1
    return nodes


def _draw_nodes(rng):
    card = float(rng.choice([40e9, 80e9, 141e9]))
    per_node = int(rng.choice([4, 8]))
    n_params, activations = float(rng.integers(10, 500)) * 1e9, float(rng.integers(5, 39)) * 1e9
    if rng.random() < 0.5:  # states that just leave no room: what activations add makes a node more
        nodes = int(rng.integers(1, 9))
        n_params = float((nodes * per_node * card - activations / 2) // 16)
    return n_params, activations, card, per_node


# Known mistakes.


def _nodes(states=16, rounded=math.ceil, unit=1.0, per_node=True, activations=1.0):
    def compute(n_params, activation_bytes, card_bytes=80e9, gpus_per_node=8):
        room = unit * card_bytes - activations * activation_bytes
        if room <= 0:
            return None
        return rounded(states * n_params / room / (gpus_per_node if per_node else 1))

    return compute


def _activations_shared(n_params, activation_bytes, card_bytes=80e9, gpus_per_node=8):
    if activation_bytes >= card_bytes:
        return None
    return math.ceil((16 * n_params + activation_bytes) / (card_bytes * gpus_per_node))


NODES_NEEDED = Exercise(
    chapter=5,
    solution=nodes_needed,
    expect=_expect_nodes,
    route="one node after the other, until it fits",
    draw=_draw_nodes,
    cases=(
        Case((70e9, 5.4e9), 2, "70B, full recompute: 70 GB of states a card on 16"),
        Case((70e9, 0.0), 2, "70B on 8 x 80 GB: 140 GB of states a card"),
        Case((40e9, 0.0), 1, "40B fills 8 x 80 GB exactly"),
        Case((1e9, 80e9), None, "activations fill the card"),
    ),
    misconceptions=(
        Misconception(
            "activations are shared out too",
            (_activations_shared,),
            "ZeRO cuts weights, gradients and optimizer. Every card has its own micro-batch, and "
            "keeps all of its activations.",
            "What of a card's memory does not shrink with more cards?",
        ),
        Misconception(
            "activations are forgotten",
            (_nodes(activations=0.0),),
            "16 bytes a parameter are the model states only.",
            "How much of a card is left for the states?",
        ),
        Misconception(
            "rounded down",
            (_nodes(rounded=math.floor), _nodes(rounded=round)),
            "A model that needs 1.88 nodes does not fit on 1.",
            "Check your answer: does it fit?",
        ),
        Misconception(
            "cards instead of nodes",
            (_nodes(per_node=False),),
            "Machines come in whole nodes.",
            "What does one node hold?",
        ),
        Misconception(
            "GiB for GB",
            (_nodes(unit=2**30 / 1e9), _nodes(unit=1e9 / 2**30)),
            "card_bytes is in bytes already: 80e9 is 80 GB, or 74.5 GiB.",
            "Look for a power of two in your code.",
        ),
        Misconception(
            "only the weights",
            (_nodes(states=2),),
            "Training holds 2 bytes of weights, 2 of gradients and 12 of optimizer.",
            "How many bytes does the docstring give a parameter?",
        ),
    ),
)

EXERCISES = (NODES_NEEDED,)
