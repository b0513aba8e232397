"""One action of a pipeline rank, and its short name.

Code counts micro-batches and chunks from 0. Short names count from 1, as figures do: F3 is the
forward pass of the third micro-batch, F3.2 that of its second chunk.
"""

import re
from typing import NamedTuple

from parlab.units import require_int

KINDS = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}
# +1 where a forward pass starts to hold its activations, -1 where backward has done with them.
HOLDS = {"F": 1, "B": -1, "I": 0, "W": -1}

_SHORT = re.compile(r"([FBIW])([1-9][0-9]{0,8})(?:\.([1-9][0-9]{0,8}))?")


class Action(NamedTuple):
    """What a rank does next: one kind of pass of one micro-batch through one of its chunks.

    kind: F forward, B full backward; I and W are its two halves, for the gradient of the input
    and for that of the weights. Zero-bubble papers call them B and W.
    """

    kind: str
    micro_batch: int
    chunk: int = 0


def short_name(action, chunks=1):
    """Write an action as in a figure: F3, or F3.2 where a rank has several chunks.

    >>> short_name(Action("F", 2)), short_name(Action("B", 0, 1), chunks=2)
    ('F3', 'B1.2')
    """
    kind, micro_batch, chunk = action
    return f"{kind}{micro_batch + 1}" + (f".{chunk + 1}" if chunks > 1 else "")


def parse_action(entry, place):
    """Return an Action from a short name, (kind, micro_batch) or (kind, micro_batch, chunk).

    place: where the entry stands, for the message. ValueError or TypeError for anything else.

    >>> parse_action("F3.2", "rank 0")
    Action(kind='F', micro_batch=2, chunk=1)
    """
    if isinstance(entry, str):
        match = _SHORT.fullmatch(entry)
        if match is None:
            raise ValueError(
                f"{place}: an action is F, B, I or W and a number from 1, as in F3, or F3.2 for "
                f"chunk 2, got {entry!r:.40}"
            )
        kind, micro_batch, chunk = match.groups(default="1")
        return Action(kind, int(micro_batch) - 1, int(chunk) - 1)
    if not isinstance(entry, tuple) or len(entry) not in (2, 3):
        raise TypeError(
            f"{place}: an action is (kind, micro_batch) or (kind, micro_batch, chunk), "
            f"got {entry!r:.60}"
        )
    kind, *numbers = entry
    if not isinstance(kind, str) or kind not in KINDS:
        raise ValueError(f"{place}: kind must be one of F, B, I, W, got {kind!r:.40}")
    pairs = zip(("micro_batch", "chunk"), numbers, strict=False)
    return Action(kind, *(require_int(f"{place}: {name}", n, minimum=0) for name, n in pairs))
