"""A sharded module against the whole one: same weights, same input, every gradient compared."""

import torch
import torch.distributed as dist

from parlab.distributed import compat
from parlab.distributed.gpt import GPTConfig
from parlab.distributed.sharding import require_shares, shards_of, sum_partial_gradients
from parlab.units import require_int

# Of an absolute difference in float64. Sharded sums add in another order: values up to about 100
# pass through ten sums of at most 100 terms, each rounding 1e-16 of them: 1e-11 at the very most.
TOLERANCE = 1e-11


def block_config(hidden, heads, kv_heads, ffn, sequence):
    """The checked shape of one block on its own."""
    sizes = {"hidden": hidden, "heads": heads, "kv_heads": kv_heads, "ffn": ffn}
    return GPTConfig(vocab=1, layers=1, sequence=sequence, **sizes)


@torch.no_grad()
def random_weights(module, seed):
    """Give it float64 weights, none left at 0 or 1, which would hide a bias added twice."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.double().parameters():
        drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        parameter.copy_(drawn / parameter.shape[-1] ** 0.5 if parameter.dim() > 1 else 1 + drawn)
    return module


def random_input(rows, sequence, hidden, seed):
    """x, and the gradient that arrives at the output, both (rows, sequence, hidden)."""
    require_int("rows", rows, minimum=1)
    generator = torch.Generator().manual_seed(seed + 1)
    return torch.randn(2, rows, sequence, hidden, generator=generator, dtype=torch.float64)


def my_positions(x):
    """This rank's part (b, s / N, h) of x (b, s, h) under sequence parallelism."""
    n = dist.get_world_size()
    require_shares("sequence", x.shape[1], n, "a rank keeps s / N positions")
    return x.chunk(n, dim=1)[dist.get_rank()]


def gradients(module, run, x, direction, sum_partial=False):
    """The output, and the gradients of sum(output * direction) by x and by every parameter."""
    x = x.detach().clone().requires_grad_()
    output = run(x)
    (output * direction).sum().backward()  # backward(direction) would load sympy, 0.4 s a rank
    if sum_partial:
        sum_partial_gradients(module)
    by_name = {name: parameter.grad for name, parameter in module.named_parameters()}
    return {"output": output.detach(), "x": x.grad, **by_name}


def differences(whole, ours):
    """Largest absolute difference per name, this rank's share being what a parameter compares."""
    n, rank = dist.get_world_size(), dist.get_rank()
    largest = {}
    for name, expected in whole.items():
        if name not in ("output", "x"):
            expected = shards_of(name, expected, n)[rank]
        found = compat.local_part(ours[name])
        if found.shape != expected.shape:  # a difference would broadcast
            raise ValueError(f"{name} must have shape {expected.shape}, got {found.shape}")
        largest[name] = (found - expected).abs().max().item()
    return largest
