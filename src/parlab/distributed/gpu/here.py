"""Whether this machine has a card, for notebook cells that measure on one."""

import torch


def card_here():
    """Return "cuda" where a card can be used; else say so in a line, and return None.

    A live cell begins with `if card := card_here():`, so that it ends calmly without a card.
    """
    if torch.cuda.is_available():
        return "cuda"
    print("No GPU here: this cell measures on a card where there is one.")
    return None
