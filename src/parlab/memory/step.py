"""Everything that one rank holds during a training step, item by item, at four moments.

Psi is the parameters on a rank, N the GPUs over which ZeRO shards them, w, g and k bytes per
parameter of weights, gradients and optimizer; s is the sequence, b the micro-batch, h hidden, f
ffn, V the vocabulary, t the ranks of tensor parallelism, p pipeline stages, v chunks a rank.
1 GB = 10^9 bytes.
"""

from functools import lru_cache

from parlab.memory.held import Options, at_moments, rank_share
from parlab.memory.layer import ask, embedding_mask, layer_step
from parlab.memory.states import BYTE_RECIPES, MOST_GPUS, require_expert_parallel, require_stage
from parlab.models import ModelConfig
from parlab.units import require_bool, require_choice, require_int, require_number

LOSSES = ("torch", "megatron", "fused")
# What the CUDA context takes when kernels are loaded at their first use (about 300 MB; all at once
# took more than 1000 MB): https://github.com/pytorch/pytorch/issues/107667. NCCL's buffers come
# on top. An H200 with CUDA 13 took 804 MB (data/measurements).
CUDA_CONTEXT_BYTES = 300_000_000
# Bytes that torch's Adam makes for each parameter when it updates all at once.
_TEMPORARIES = {
    **dict.fromkeys(("mixed-precision", "autocast", "fp32-gradients", "fp16-main-gradients"), 4),
    "pure-bf16": 2,
}


def training_memory(
    config,
    micro_batch,
    *,
    sequence,
    n_gpus=1,
    stage=0,
    recipe="mixed-precision",
    tp=1,
    sequence_parallel=False,
    pipeline=1,
    chunks=1,
    pipeline_rank=None,
    context_parallel=1,
    expert_parallel=1,
    expert_load=1,
    recompute="none",
    flash=True,
    dropout=False,
    loss="torch",
    keep_logits=True,
    keep_gradients=False,
    gradient_as_bucket_view=False,
    reshard_after_forward=True,
    prefetch=1,
    offload=False,
    foreach=True,
    reserved=False,
    fragmentation=0,
    context_bytes=0,
):
    """Bytes that one rank holds during a training step, by item, at four moments.

    "after the step": the model states of `zero_memory`, gradients not yet freed. "loss": forward
    has ended. "backward": where it is fullest, which is in the loss's own backward, or in the last
    layer with all activations, or in the first with all gradients (layers are alike, so nothing
    between is fuller). "optimizer": inside its step.

    Activations are those of `activation_memory`; Korthikanti et al. (arXiv 2205.05198), section
    4.3, has those of embedding and head. Under stage 3 FSDP2 (torch.distributed.fsdp.fully_shard)
    holds the layer at work and `prefetch` more in 16 bits, and in its root group the embedding and
    the head from first to last; a gradient is in flight as backward makes it and, of the layer
    before, as it is reduced, in g bytes; stage 2 is taken to reduce in the same way. Parameters of
    the rank are counted exactly; a tied head has a copy of the embedding if p > 1.

    config: a ModelConfig. micro_batch: b. sequence: s. n_gpus: N, data-parallel ranks, over which
        `stage` of ZeRO shards; N t p GPUs in all. recipe: a name in BYTE_RECIPES; those with fp32
        weights run under autocast, which keeps its 16-bit casts until backward has used them. Not
        compiled, torch.autocast keeps more of each layer: see `autocast_memory`.
    tp, sequence_parallel, pipeline, chunks, recompute, flash, dropout, expert_load: as in
        `activation_memory`. pipeline_rank: None is the fullest (the first or the last).
        expert_parallel: as in `expert_zero_memory`.
    context_parallel: ranks that cut a sequence, of which this one has s tokens, by ring attention:
        a block of keys and values is in use while the next arrives, in backward with gradients.
    loss: "torch" (cross_entropy) keeps a log-softmax in fp32 and makes two fp32 gradients of it, 12
        bytes a logit; "megatron" works in place and makes one in 16 bits, 6; "fused" never has all
        logits. keep_logits: True if a variable holds the model's 16-bit output through backward.
    keep_gradients: True if they are there when forward starts: accumulated over micro-batches (a
        pipeline always does), or in a buffer that lasts; False if zero_grad freed them.
    gradient_as_bucket_view: stage 0 with N > 1; False, DDP's default, copies gradients to buckets.
    reshard_after_forward: stage 3; False holds all layers from forward to backward.
    offload: moves what `stage` cuts to the host, as FSDP2's CPUOffloadPolicy (stage 3) does.
    foreach: torch's default on a GPU, updates all parameters at once: Adam makes as many bytes for
        each as a moment has, and fp32 masters need 4 for fp32 gradients. False: one at a time, or
        fused.
    reserved: True adds, under stage 3, what the caching allocator keeps for FSDP2's own streams,
        since no other stream may use it: buffers of gathers, and sharded gradients even when freed.
    fragmentation: reserved minus allocated, as a fraction of the allocated bytes.
    context_bytes: of CUDA itself, which torch's gauges leave out: about CUDA_CONTEXT_BYTES; with
        all kernels loaded at once more (Hugging Face's "Model training anatomy": 1343 MB).
    Raises ValueError or TypeError for what is not allowed or does not divide.

    >>> from parlab.models import model
    >>> step = training_memory(model("llama-3-8b"), 1, sequence=8192, n_gpus=8, stage=3)
    >>> [round(total / 1e9, 2) for total in step.totals]
    [16.06, 66.65, 75.05, 24.09]
    >>> [item.bytes[1] for item in step.items if item.name.startswith("logits")]
    [2101346304, 4202692608]
    """
    if not isinstance(config, ModelConfig):
        raise TypeError(f"config must be a ModelConfig, got {config!r:.60}")
    if config.positions is not None:
        why = "no position was learned for a later token"
        require_int("sequence", sequence, minimum=1, maximum=config.positions, why=why)
    shape = (config, micro_batch, sequence, tp, sequence_parallel, dropout, flash, expert_load)
    layer = ask(layer_step, (*shape, recompute))
    degrees = (config, tp, pipeline, chunks, n_gpus, context_parallel, expert_parallel)
    how = (stage, recipe, loss, prefetch, fragmentation, context_bytes)
    flags = (keep_logits, keep_gradients, gradient_as_bucket_view, reshard_after_forward)
    shares = ask(_shares, (pipeline_rank, *degrees, *how, *flags, offload, foreach, reserved))
    mask = embedding_mask(layer.sizes, pipeline, chunks)[2] if dropout else 0
    most, memory = at_moments(shares[0], layer, mask)
    fuller = at_moments(shares[1], layer, mask, most) if len(shares) > 1 else None
    return fuller[1] if fuller else memory


def training_memory_bytes(config, micro_batch, *, sequence, **options):
    """Bytes at the fullest moment of a step: the peak of `training_memory`, with its arguments."""
    return training_memory(config, micro_batch, sequence=sequence, **options).peak


@lru_cache(maxsize=4096, typed=True)  # a sweep over batches asks for the same ones over and over
def _shares(
    rank, config, tp, pipeline, chunks, n_gpus, context_parallel, expert_parallel, *options
):
    """Check options and degrees, but tp; return the RankShares of a rank, or of both ends."""
    options = ask(_options, options)
    pipeline = require_int("pipeline", pipeline, minimum=1)
    n = require_int("n_gpus", n_gpus, minimum=1, maximum=MOST_GPUS)
    in_ring = require_int("context_parallel", context_parallel, minimum=1) > 1
    ep = require_expert_parallel(expert_parallel, config, n)
    if rank is not None:
        ends = [require_int("pipeline_rank", rank, minimum=0, maximum=pipeline - 1)]
    else:
        ends = [0, pipeline - 1] if pipeline > 1 else [0]
    degrees = (int(tp), pipeline, chunks, n, in_ring, ep)  # NumPy's products would wrap around
    return [rank_share(config, degrees, options, number) for number in ends]


@lru_cache(maxsize=1024, typed=True)  # a search varies few of them
def _options(
    stage,
    recipe,
    loss,
    prefetch,
    fragmentation,
    context_bytes,
    keep_logits,
    keep_gradients,
    gradient_as_bucket_view,
    reshard_after_forward,
    offload,
    foreach,
    reserved,
):
    """Check what does not depend on sizes; return it as Options."""
    stage = require_stage(stage)
    recipe = require_choice("recipe", recipe, BYTE_RECIPES)
    loss = require_choice("loss", loss, LOSSES)
    prefetch = require_int("prefetch", prefetch, minimum=0)
    fragmentation = require_number("fragmentation", fragmentation, minimum=0)
    context_bytes = require_number("context_bytes", context_bytes, minimum=0)
    require_bool("keep_logits", keep_logits)
    require_bool("keep_gradients", keep_gradients)
    require_bool("gradient_as_bucket_view", gradient_as_bucket_view)
    require_bool("reshard_after_forward", reshard_after_forward)
    require_bool("foreach", foreach)
    require_bool("reserved", reserved)
    if require_bool("offload", offload) and stage == 0:
        raise ValueError("offload must be False at stage 0, got True: it moves what ZeRO cuts")
    reserved = reserved and stage == 3
    temporaries = _TEMPORARIES.get(recipe, 0) if foreach and not offload else 0
    of_logit = {
        "torch": (2 * keep_logits, 4, 8),
        "megatron": (2 * keep_logits, 4, 2),
        "fused": (0, 0, 0),
    }
    return Options(
        stage,
        BYTE_RECIPES[recipe].of_each,
        prefetch,
        reshard_after_forward,
        offload,
        reserved,
        keep_gradients or reserved,
        gradient_as_bucket_view,
        temporaries,
        temporaries > 0 and recipe == "mixed-precision",
        *of_logit[loss],
        fragmentation,
        context_bytes,
    )
