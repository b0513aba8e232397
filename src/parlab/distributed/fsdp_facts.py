"""Single facts about fully sharded training, one small experiment each.

All functions but `host_link_bytes` are called by every rank alike, inside `run_ranks`. Models are
so small that every number can be checked by hand.
"""

from math import prod
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from parlab.distributed import compat
from parlab.distributed.gpt import token_loss
from parlab.distributed.measure import wire_bytes
from parlab.units import MB, require_choice, require_int


def gloo_wire(tensor_bytes=4 * MB):
    """Bytes that gloo moves between all ranks for each collective, in units of the tensor's bytes.

    A ring moves 2 (N - 1) for an all-reduce and N - 1 for the others. gloo has no reduce-scatter of
    its own: it runs an all-reduce and drops what is not this rank's. None where the system does not
    count (see `measure.wire_bytes`). Returns {operation: bytes / tensor_bytes}.
    """
    n = dist.get_world_size()
    require_int("tensor_bytes", tensor_bytes, minimum=4 * n, why="every rank has a float32")
    whole = torch.zeros(tensor_bytes // 4 // n * n)
    part = torch.zeros(len(whole) // n)
    calls = {
        "all_reduce": lambda: dist.all_reduce(whole),
        "all_gather": lambda: compat.all_gather_rows(whole, part),
        "reduce_scatter": lambda: compat.reduce_scatter_rows(part, whole),
    }
    counted = {op: wire_bytes(call) for op, call in calls.items()}
    return {op: count and count / whole.nbytes for op, count in counted.items()}


def host_link_bytes(counter, element_bytes=4):
    """Bytes over a rank's link to its host if this step ran on GPUs with `CPUOffloadPolicy`.

    A rank's shard goes up before every all-gather, and its part of every reduced gradient comes
    down, both in the dtype in which the shard is kept; the optimizer's states stay where they are.
    With resharding that is 2 m and m times Psi / N elements. Not shown by a run without GPUs:
    that these copies take place, how long they take, and what pinned memory saves.

    counter : of `fsdp_train.count_step`. Returns (up, down).
    """
    elements = {"all_gather": 0, "reduce_scatter": 0}
    for call in counter.calls:
        if call.op in elements:
            elements[call.op] += prod(call.shape) // call.n_ranks
    return tuple(element_bytes * count for count in elements.values())


class Held(NamedTuple):
    """What one rank holds of one matrix: rows, and bytes with the padding."""

    rows: int
    weight_bytes: int
    gradient_bytes: int
    optimizer_bytes: int


def hold_rows(rows=10, columns=3):
    """Shard one (rows, columns) matrix in float32 and take a step of AdamW; what has this rank?

    `fully_shard` gives each rank ceil(rows / N) rows until none are left. It pads weights, and the
    gradients that a reduce-scatter brings, to that number on every rank; the optimizer's two
    moments are not padded.

    >>> from parlab.distributed.launch import run_ranks
    >>> [tuple(held) for held in run_ranks(hold_rows, 3, args=(4,))]
    [(2, 24, 24, 48), (2, 24, 24, 48), (0, 24, 24, 0)]
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    require_int("rows", rows, minimum=1)
    require_int("columns", columns, minimum=1)
    matrix = nn.Linear(columns, rows, bias=False)
    fully_shard(matrix, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(matrix.parameters())
    matrix(torch.ones(1, columns)).sum().backward()
    optimizer.step()
    weight = matrix.weight
    moments = [optimizer.state[weight][name] for name in ("exp_avg", "exp_avg_sq")]
    return Held(
        compat.local_part(weight).shape[0],
        *(compat.local_part(t).untyped_storage().nbytes() for t in (weight, weight.grad)),
        sum(compat.local_part(moment).untyped_storage().nbytes() for moment in moments),
    )


def share_weight(groups):
    """Train an embedding and a head that share one weight; returns (message, weights, gap).

    message: of the error that was raised, or "". weights: how many different weights the two layers
    have afterwards. gap: the largest difference of either from the serial run, after one step.

    groups : "separate" calls `fully_shard` on each: torch 2.13 refuses this at the first forward
        pass; 2.11 says nothing, cuts the weight twice and trains two. "together" calls it on the
        list of both. "root" leaves both to the call on the model around them.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    groups = require_choice("groups", groups, ("separate", "together", "root"))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model, alone = _tied_layers(), _tied_layers()
    for group in {"separate": list(model), "together": [list(model)], "root": []}[groups]:
        fully_shard(group, mesh=mesh)
    fully_shard(model, mesh=mesh)
    try:
        _one_step(model)
    except ValueError as error:
        return str(error), None, None
    _one_step(alone)
    weights = {layer.weight for layer in model}
    gaps = [(compat.whole_tensor(w) - alone[0].weight).abs().max().item() for w in weights]
    return "", len(weights), max(gaps)


def _tied_layers(vocab=5, hidden=4):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(vocab, hidden), nn.Linear(hidden, vocab, bias=False))
    model[1].weight = model[0].weight
    return model.double()


def _one_step(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    token_loss(model(torch.tensor([[0, 1, 2]])), torch.tensor([[1, 2, 3]])).backward()
    optimizer.step()
