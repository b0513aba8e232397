"""Where the parts of the measuring program run, and which sizes fit there."""

from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from parlab.distributed.gpu.links import host_link
from parlab.distributed.gpu.training import best_compute
from parlab.gpu_prediction.rows import config_of
from parlab.gpu_prediction.training import autocast_memory
from parlab.units import GB, MB

SMALL = {"layers": 2, "hidden": 64, "heads": 4, "vocab": 512, "positions": 64}
LEAVE_FREE = 0.9  # of what is free: the allocator's blocks do not fit each other without gaps


class Found(NamedTuple):
    """What a part gives: its configuration, {item: measured}, and texts to keep by name."""

    configuration: dict
    measured: dict
    texts: dict


class Skipped(Exception):
    """A part that cannot run here, and why."""


@dataclass
class Machine:
    """Where the parts run: "cuda" or "cpu", and the bytes of the card that are free at the start.

    data_sheet: the card's name in parlab's own data sheet; None where it has no row.
    """

    device: str
    free_bytes: int
    data_sheet: str | None = None
    compute: str = field(default="")

    def __post_init__(self):
        self.compute = self.compute or best_compute(self.device)

    @property
    def on_card(self):
        """Whether this is a card, or the dry run of its program."""
        return self.device == "cuda"

    @cached_property
    def link(self):
        """The link to the host, measured once."""
        if self.on_card:
            return host_link(self.device)
        return host_link(self.device, size_bytes=MB, adam_params=100_000)

    @property
    def shape(self):
        """The GPT that is trained: GPT-2 of 124M parameters on a card."""
        return "gpt2" if self.on_card else SMALL

    def batch(self, recompute="none", most=8):
        """{model, micro_batch, sequence, compute}: the largest micro-batch that fits.

        Raises Skipped, with need and have, where not even one sequence does.
        """
        config = config_of(self.shape)
        size = {"sequence": config.positions, "recompute": recompute, "compute": self.compute}
        b = most
        while b and autocast_memory(config, b, **size).peak > LEAVE_FREE * self.free_bytes:
            b //= 2
        if not b:
            self.require(autocast_memory(config, 1, **size).peak)
        return {
            "model": self.shape,
            "micro_batch": b,
            "sequence": config.positions,
            "compute": self.compute,
        }

    def require(self, n_bytes):
        """Skip the part where the card has less free memory than it needs."""
        have = LEAVE_FREE * self.free_bytes
        if n_bytes > have:
            raise Skipped(
                f"needs {n_bytes / GB:.2f} GB of the card, of which {have / GB:.2f} GB can be used "
                f"({LEAVE_FREE:.0%} of what was free): close other programs, or take a larger card"
            )
