"""Bytes of states and activations for the ledger, and FLOP; fractions are plain numbers."""

from parlab import hardware, models
from parlab.accuracy import memory as measured
from parlab.gpu_prediction.training import autocast_memory
from parlab.memory.activations import activation_memory, logits_bytes
from parlab.memory.states import (
    BYTE_RECIPES,
    dim0_shards,
    expert_zero_memory_bytes,
    zero_memory,
    zero_memory_bytes,
)
from parlab.memory.step import training_memory
from parlab.models import ModelConfig
from parlab.units import GB

# Korthikanti et al. (arXiv 2205.05198): all their runs have s = 2048, t = 8, V = 51200.
PAPER = {"sequence": 2048, "tp": 8}
GPT_3 = ModelConfig(layers=96, hidden=12288, heads=96, vocab=51200)


def state_bytes(n_params, n_gpus, stage, recipe="mixed-precision"):
    return zero_memory_bytes(n_params, n_gpus, stage, **BYTE_RECIPES[recipe].arguments)


def float64_state_bytes(n_params, n_gpus, stage):
    """8 + 8 + 16 bytes per parameter: Adam without masters."""
    return zero_memory_bytes(n_params, n_gpus, stage, k=16, weight_bytes=8, grad_bytes=8)


def bytes_left(card_bytes, n_params, n_gpus, stage):
    return card_bytes - zero_memory_bytes(n_params, n_gpus, stage)


def bytes_per_parameter(recipe):
    return BYTE_RECIPES[recipe].total


def cards_for_states(n_params, card_bytes):
    return zero_memory_bytes(n_params, 1, 0) / card_bytes


def usable_card_bytes(card):
    return hardware.gpu(card).usable_bytes


def as_bytes(gigabytes):
    return gigabytes * GB


def named_model_state_bytes(name, n_gpus, stage):
    return zero_memory_bytes(models.model(name).n_params, n_gpus, stage)


def states_saved_by_sharding(name, few, many):
    """16 Psi (1/few - 1/many)."""
    psi = models.model(name).n_params
    return zero_memory_bytes(psi, few, 3) - zero_memory_bytes(psi, many, 3)


def share_of_fullest_rank(rows, n_gpus):
    fullest = zero_memory(rows, n_gpus, 3, parameter_sizes=[(rows,)]).fullest
    return fullest.total / zero_memory_bytes(rows, 1, 3)


def rows_of_ranks(rows, n_gpus):
    return dim0_shards(rows, n_gpus)


def parameters(name):
    return models.model(name).n_params


def active_parameters(name):
    return models.model(name).n_active_params


def parameters_of_gpt(layers, hidden, heads):
    return _gpt(layers, hidden, heads).n_params


def expert_state_bytes(name, n_gpus, stage, expert_parallel):
    return expert_zero_memory_bytes(
        models.model(name), n_gpus, stage, expert_parallel=expert_parallel
    )


def first_stage_state_bytes(layers, hidden, pipeline):
    """18 bytes for each of 12 L h^2 / tp parameters: 16-bit weights, fp32 gradients, Adam."""
    n_params = 12 * layers * hidden**2 // (PAPER["tp"] * pipeline)
    return state_bytes(n_params, 1, 0, "fp32-gradients")


def first_stage_activation_bytes(
    layers, hidden, heads, pipeline, chunks, micro_batch, sequence_parallel=False, recompute="none"
):
    return activation_memory(
        _gpt(layers, hidden, heads),
        micro_batch,
        pipeline=pipeline,
        chunks=chunks,
        sequence_parallel=sequence_parallel,
        recompute=recompute,
        **PAPER,
    ).total


def share_of_activations(model, sequence_parallel=False, recompute="none"):
    """Activations over those without either saving, for a model of the paper by its name."""
    config = _gpt(*_SHAPES[model])
    saved = activation_memory(
        config, 1, sequence_parallel=sequence_parallel, recompute=recompute, **PAPER
    )
    return saved.total / activation_memory(config, 1, **PAPER).total


def kept_in_units_of_sbh(block, **options):
    """What a layer of GPT-3 keeps, or one block of it ("attention", "MLP"), in units of sbh."""
    kept = activation_memory(GPT_3, 2, sequence=2048, **options)
    items = [item.layer_bytes for item in kept.items if block in ("layer", item.block)]
    return sum(items) / (2 * 2048 * GPT_3.hidden)


def logit_bytes(tokens, vocab, element_bytes):
    return logits_bytes(tokens, vocab, element_bytes=element_bytes)


def megatron_bytes(tensor, pipeline, micro_batch, gpu, moment):
    """As `parlab.accuracy.memory` has it: tensors have the same sizes on every GPU."""
    return measured.megatron_bytes(tensor, pipeline, micro_batch, moment)


def torchtitan_peak_bytes(n_gpus, compiled):
    """As `parlab.accuracy.memory` has it."""
    return measured.torchtitan_peak_bytes(n_gpus, compiled)


def autocast_bytes(moment):
    """GPT-2 in eager PyTorch, 4 sequences of 1024 tokens."""
    return autocast_memory(models.model("gpt2"), 4, sequence=1024).at(moment)


def step_bytes_per_parameter(item, moment):
    """What one item holds for each parameter of GPT-2, on 8 GPUs with DDP and autocast."""
    config = models.model("gpt2")
    step = training_memory(config, 1, sequence=64, n_gpus=8, recipe="autocast")
    place = step.totals.index(step.at(moment))
    return sum(i.bytes[place] for i in step.items if i.name == item) / config.n_params


def step_bytes(model, moment, n_gpus, stage, **options):
    """One sequence of 8192 tokens on each GPU in bf16, with a flash kernel."""
    step = training_memory(
        models.model(model), 1, sequence=8192, n_gpus=n_gpus, stage=stage, **options
    )
    return step.peak if moment == "peak" else step.at(moment)


def not_resharding_over_resharding(n_gpus):
    """Bytes after the step of FSDP that does not reshard over those of one that does."""
    kept, freed = (
        step_bytes("llama-3-8b", "after the step", n_gpus, 3, reshard_after_forward=again)
        for again in (False, True)
    )
    return kept / freed


def share_of_peak_flop(
    model, n_gpus, global_batch, sequence_parallel_selective_s, recomputed=False
):
    """MFU on A100s; with `recomputed` HFU, for which the paper counts all scores once more."""
    flops = _gpt(*_SHAPES[model]).flops_per_token(PAPER["sequence"])
    work = flops.training + recomputed * 3 * flops.scores
    tokens = global_batch * PAPER["sequence"]
    peak = n_gpus * hardware.gpu("a100-80").bf16_flop_per_s
    return tokens * work / (sequence_parallel_selective_s * peak)


def recomputed_flop_share(recompute):
    """Forward FLOP that recomputing adds, over forward and backward, for a layer of GPT-3."""
    flops = GPT_3.flops_per_token(2048)
    layer = flops.forward - flops.head
    return (layer if recompute == "full" else flops.scores) / (3 * layer)


def _gpt(layers, hidden, heads):
    return ModelConfig(layers=layers, hidden=hidden, heads=heads, vocab=51200, positions=2048)


_SHAPES = {
    "22B": (48, 6144, 64),
    "175B": (96, 12288, 96),
    "530B": (105, 20480, 128),
    "1T": (128, 25600, 160),
}
