"""What takes several cards, or here several processes: messages, Megatron's MLP, and 16 Psi / N."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from parlab.collectives.cost import bus_bandwidth
from parlab.distributed.agreement import (
    block_config,
    differences,
    gradients,
    random_input,
    random_weights,
)
from parlab.distributed.gpt import MLP
from parlab.distributed.gpu.training import Step, gpt_config, token_batch
from parlab.distributed.measure import sweep
from parlab.distributed.sharding import f, shard_layers
from parlab.distributed.zero import held_bytes
from parlab.fit import fit_latency_bandwidth
from parlab.gpu_prediction.rows import config_of


def measure_ranks(shape, sizes_bytes, hidden=64, seconds_per_size=0.2, device="cpu"):
    """All rows of the part "ranks", measured by all ranks of the default group alike.

    shape: what `config_of` takes, of the model whose states are sharded. sizes_bytes: of the
    all-reduces. hidden: of the MLP, whose inner size is 4 x hidden.
    """
    device = torch.device(device)
    timings = sweep(sizes_bytes, seconds_per_size=seconds_per_size, device=device)
    seconds = [timing.median("all_reduce") for timing in timings]
    sizes = [timing.tensor_bytes for timing in timings]
    fit = fit_latency_bandwidth(sizes, seconds)
    bus = bus_bandwidth("all_reduce", dist.get_world_size(), sizes[-1], seconds[-1])
    states = _over_ranks(_sharded_states(shape, device), device)
    return {
        "all-reduce, latency": fit.latency_s,
        "all-reduce, bus bandwidth": bus,
        "all-reduce, mean error of the fit": fit.mean_relative_error,
        "Megatron MLP, largest difference": _over_ranks(_mlp_difference(hidden, device), device),
        "model states of the fullest rank": int(states),
    }


def parameter_shapes(config):
    """Shapes of all parameters of the package's GPT, a tied one once."""
    from parlab.distributed.gpt import GPT

    with torch.device("meta"):
        return [list(weight.shape) for weight in GPT(gpt_config(config)).parameters()]


def _mlp_difference(hidden, device):
    """Megatron's MLP cut over the ranks against the whole one, in float64, as `check_mlp` does."""
    mlp = random_weights(MLP(block_config(hidden, 1, None, 4 * hidden, 1)), 0).to(device)
    x, direction = (tensor.to(device) for tensor in random_input(8, 1, hidden, 0))
    share = shard_layers(mlp)
    whole = gradients(mlp, mlp, x, direction)
    ours = gradients(share, lambda x: share(f(x)), x, direction)
    return max(differences(whole, ours).values())


def _sharded_states(shape, device):
    """Bytes of weights, gradients and moments on this rank after a step in fp32."""
    config = config_of(shape)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))

    def shard(model):
        for unit in (*model.blocks, model):
            fully_shard(unit, mesh=mesh)

    step = Step(device, config, compute="fp32", shard=shard)
    step.run(*token_batch(1, min(128, config.positions), config.vocab, device))
    held = held_bytes(list(step.model.parameters()), step.optimizer)
    # Less AdamW's numbers of steps, 4 bytes for each parameter tensor, which are on the host.
    return held.total - 4 * sum(1 for _ in step.model.parameters())


def _over_ranks(value, device):
    largest = torch.tensor(float(value), dtype=torch.float64, device=device)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return largest.item()
