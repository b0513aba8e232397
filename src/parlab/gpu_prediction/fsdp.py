"""`fully_shard` on one card: where it holds what the plain model holds, and what differs."""

from typing import NamedTuple

from parlab.gpu_prediction.training import autocast_memory
from parlab.memory.moments import TrainingMemory
from parlab.units import require_bool, require_number


def fsdp_memory(config, micro_batch, *, sequence, offload=False, compute="bf16", foreach=True):
    """Bytes on the card with `fully_shard` on each block and then the model, N = 1, under autocast.

    Between steps a shard is the whole weight, so nothing differs from `autocast_memory`. From
    forward to the end of the loss's backward the root's weights (embedding, positions, last norm)
    are there once more, gathered: the root keeps them, since backward needs them first. Blocks are
    gathered one by one, and none is while the loss is at work.

    offload: with `CPUOffloadPolicy` weights, gradients and moments are on the host (`host_bytes`,
    between steps), and the optimizer runs there.
    The other parameters, and errors, are those of `autocast_memory`. Raises ValueError where the
    loss's backward is not the fullest: no formula here says what is gathered then.

    >>> from parlab.models import model
    >>> gpt2 = model("gpt2")
    >>> fsdp_memory(gpt2, 8, sequence=1024).peak - autocast_memory(gpt2, 8, sequence=1024).peak
    157541376
    >>> offloaded = fsdp_memory(gpt2, 8, sequence=1024, offload=True)
    >>> offloaded.host_bytes == 16 * gpt2.n_params, offloaded.peak
    (True, 8409205248)
    """
    plain = autocast_memory(
        config, micro_batch, sequence=sequence, compute=compute, foreach=foreach
    )
    if not any(name == "gradients of the logits" for name, _, _ in plain.rows):
        raise ValueError(
            f"micro_batch x sequence must be larger, got {micro_batch} x {sequence}: backward is "
            "fullest inside the layers, where no formula says what is gathered"
        )
    psi = config.n_params
    root = 4 * (psi - config.layers * config.layer_params)
    rows = list(plain.rows)
    host = 0
    if require_bool("offload", offload):
        host = 16 * psi
        states = ("weights", "gradients", "optimizer", "temporaries of foreach")
        rows = [row for row in rows if row[0] not in states]
    rows.append(("gathered embedding, positions and last norm", "on top", (0, root, root, 0)))
    return TrainingMemory.of_rows(rows, host_bytes=host)


class OffloadTime(NamedTuple):
    """Seconds that offloading adds to a step if nothing of it hides behind computing."""

    to_card: float
    to_host: float
    optimizer: float

    @property
    def total(self):
        """All three."""
        return sum(self)


def offload_seconds(config, to_card_bytes_per_s, to_host_bytes_per_s, adam_params_per_s):
    """Seconds that `CPUOffloadPolicy` adds to a step, from the host link's and the host's speed.

    To the card go the weights of every block twice, for forward and for backward, and the root's
    once, in fp32; to the host every gradient once, in fp32; the host then updates all parameters.
    The copies may hide behind computing, the optimizer cannot: `optimizer` is the least and
    `total` the most that a step takes longer.

    to_card_bytes_per_s, to_host_bytes_per_s: one way. adam_params_per_s: parameters that the host
    updates in a second.

    >>> from parlab.models import model
    >>> slow = offload_seconds(model("gpt2"), 25e9, 25e9, 1e9)
    >>> [round(seconds, 4) for seconds in slow], round(slow.total, 4)
    ([0.0335, 0.0199, 0.1244], 0.1779)
    """
    rates = {
        "to_card_bytes_per_s": to_card_bytes_per_s,
        "to_host_bytes_per_s": to_host_bytes_per_s,
        "adam_params_per_s": adam_params_per_s,
    }
    for name, rate in rates.items():
        require_number(name, rate, minimum=0, exclusive=True)
    blocks = config.layers * config.layer_params
    to_card = 4 * (2 * blocks + config.n_params - blocks)
    return OffloadTime(
        to_card / to_card_bytes_per_s,
        4 * config.n_params / to_host_bytes_per_s,
        config.n_params / adam_params_per_s,
    )
