"""Prompts of "Explain it in two minutes", each with a model answer; parlab computes its numbers."""

from collections.abc import Callable
from typing import NamedTuple

import parlab as pl


class Prompt(NamedTuple):
    """Something to explain aloud, and what a good explanation says."""

    chapter: int
    text: str
    answer: Callable[[], str]


def _ring():
    few, many = (pl.all_reduce_cost(n, 1e9, pl.Link(0, 1)) for n in (8, 64))
    return (
        "Cut the tensor into N chunks. In N - 1 steps each chunk travels once around the ring and "
        "collects every rank's contribution: a reduce-scatter. In N - 1 more steps the complete "
        "chunks travel on: an all-gather. Each step sends S/N bytes, so a rank sends 2 (N-1)/N S "
        f"in all: {few.bytes_per_rank / 1e9:.2f} GB for 1 GB on 8 ranks, "
        f"{many.bytes_per_rank / 1e9:.2f} GB on 64.\n\n"
        "Why that is optimal: follow one element. A send merges at most one partial sum into "
        "another, so N contributions need N - 1 sends, and then N - 1 ranks still lack the sum: "
        "2 (N-1) sends for each element, whatever the algorithm. The ring reaches this bound on "
        "all ranks at once. (A switch that adds up by itself is not bound by it.)\n\n"
        f"The price is latency: {few.steps} steps in turn on 8 ranks, {many.steps} on 64. For "
        "small tensors a tree is faster."
    )


def _averaging():
    return (
        "The loss is a mean over examples. Its gradient over the batch is the mean of the "
        "gradients over N equal shards, since every example then counts 1/|B| in both. So one "
        "all-reduce, divided by N, gives every replica the serial gradient, and all take the same "
        "step.\n\n"
        "Drop one rank's gradient, and its data have no say; count one twice, and its data weigh "
        "double. Nothing crashes, and the loss still falls: only a comparison with the serial "
        "gradient shows it. With unequal shards or token counts the plain mean is off as well: "
        f"ranks with 2 tokens (loss 1) and 8 tokens (loss 4) have a mean loss of "
        f"{pl.token_weighted_mean([1, 4], [2, 8])}, not 2.5."
    )


def _column_row():
    wires = [pl.Link(0, pl.link(n).bandwidth_bytes_per_s) for n in ("nvlink-4", "infiniband-400g")]
    nvlink, network = (
        1e3 * pl.tensor_parallel_traffic(4096, 4096, 1, 8, wire, n_layers=32).seconds
        for wire in wires
    )
    flops = pl.layer_flops(4096, 4096, 1, n_layers=32).weights
    compute = 1e3 * pl.compute_seconds(flops, 8, pl.gpu("h100-sxm"))
    return (
        "Cut by columns, each rank computes complete columns of the result: forward needs no "
        "communication as long as the result may stay split. Cut by rows, each rank computes a "
        "partial sum of all of it: an all-reduce adds them up. An MLP uses one after the other, so "
        "that GeLU sees complete entries and one all-reduce is left, in forward (g) and, for the "
        "gradient of the input, in backward (f). Attention is the same, cut by heads.\n\n"
        "These all-reduces are waited for, four in every layer. For 32 layers with h = s = 4096 "
        f"on 8 GPUs that is {nvlink:.0f} ms over NVLink and {network:.0f} ms over one InfiniBand "
        f"port, beside {compute:.0f} ms of computing on H100s at 40% of their peak. So tensor "
        "parallelism stays inside a node."
    )


def _zero():
    gb = [f"{pl.zero_memory_bytes(7e9, 8, stage) / 1e9:g}" for stage in range(4)]
    sent = [pl.zero_traffic_bytes(7e9, 8, stage) for stage in range(4)]
    return (
        "Mixed-precision Adam holds 2 bytes of weights, 2 of gradients and 12 of optimizer for "
        "each parameter. Plain data parallelism has all 16 on every GPU. Stage 1 cuts the 12 over "
        "the N ranks, stage 2 the gradients too, stage 3 the weights too. A 7B model on 8 GPUs: "
        f"{', '.join(gb)} GB for stages 0 to 3.\n\n"
        "Stages 1 and 2 send what an all-reduce sends, as a reduce-scatter of the gradients and an "
        "all-gather of the weights. Stage 3 drops the gathered weights after forward and gathers "
        f"them again in backward: {sent[3] / sent[0]:g} times the bytes. With gradient "
        "accumulation stage 2 reduces, and stage 3 also gathers, for every micro-batch."
    )


def _bubble():
    share = pl.pipeline_bubble(8, 4)
    return (
        "The last of p stages waits for p - 1 others before its first forward, and the first as "
        "long for its last backward. Of m + p - 1 slots each stage works in m, so (p-1)/(m+p-1) of "
        f"the run is idle: 7/11, {share:.0%}, for 8 stages and 4 micro-batches. Papers also divide "
        "by the time of the work, (p-1)/m; say which you mean.\n\n"
        "More micro-batches make it smaller; more stages make it larger, since each is one more "
        f"that waits. With 32 micro-batches it is {pl.pipeline_bubble(8, 32):.0%}. Several chunks "
        f"of layers a rank help too: 2 chunks, {pl.pipeline_bubble(8, 32, 2):.0%}. 1F1B has "
        "GPipe's bubble, but holds p micro-batches of activations, not m."
    )


def _cluster():
    from parlab.exercises.layout import map_3d_job

    groups, nodes = map_3d_job(tp=8, dp=2, pp=4)
    return (
        "64 GPUs, 8 nodes of 8. Tensor parallelism needs the fastest link, so it gets the 8 "
        f"neighbours of a node: tp = 8, {nodes['tp']} node a group. The pipeline sends one "
        "activation between neighbouring stages and bears the slowest links: pp = 4, stages 16 "
        f"ranks apart, such as {groups['pp'][0]}. What is left is data parallelism: dp = 2, ranks "
        f"8 apart, such as {groups['dp'][0]}; it all-reduces once a step and overlaps with "
        "backward.\n\n"
        "The product must be the number of GPUs, 8 x 2 x 4 = 64. Then check what it costs: enough "
        "micro-batches for a small bubble, states and activations that fit, and a global batch "
        "that dp, micro-batches and their size multiply to."
    )


def _context():
    causal = [pl.causal_work(131_072, 8, balanced=balanced) for balanced in (False, True)]
    busiest, even = (work.imbalance for work in causal)
    h100 = pl.gpu("h100-sxm")
    near, far = (
        pl.ring_hides_from(pl.model("llama-3-8b"), h100, pl.link(name))
        for name in ("nvlink-4", "infiniband-400g")
    )
    return (
        "Sequence parallelism belongs to tensor parallelism: between the matrices each rank keeps "
        "s/N tokens, a reduce-scatter and an all-gather stand where an all-reduce stood, and the "
        "bytes are the same. Context parallelism cuts the tokens everywhere, so that what a rank "
        "keeps falls with cp. Only attention notices: its queries must meet the keys and values of "
        "all ranks.\n\n"
        "In a ring these travel. Each rank passes its block on, cp - 1 hops, and computes "
        "meanwhile. It never sees a whole row of scores, so it keeps the largest score, the sum of "
        "exponentials and the weighted sum, and rescales them when a larger score comes: exact. "
        "Backward sends keys and values again, and their gradients.\n\n"
        "With one piece a rank the causal mask leaves the last of 8 ranks "
        f"{busiest:.3g} times the mean; an early and a late piece each make it {even:g}. A hop "
        "grows with the tokens of a rank and a step with their square, so from "
        f"{near} tokens a rank (NVLink) or {far} (InfiniBand) on the ring of Llama 3 8B hides, on "
        "H100s at 40% of their peak. Gathering keys and values first sends the same bytes in the "
        "open; all-to-alls of heads send less, but on no more ranks than there are key-value heads."
    )


def _experts():
    mixtral = pl.model("mixtral-8x7b")
    traffic = pl.expert_parallel_traffic(mixtral, 1, sequence=4096, ep=8)
    gb = pl.expert_zero_memory_bytes(mixtral, 64, 1, expert_parallel=8) / 1e9
    return (
        "Each of ep ranks holds E/ep of a layer's experts, whole. An all-to-all takes a copy of "
        "each token to each of its experts, another brings the outputs back, and backward does the "
        "same with gradients. Each sends T e h numbers, of which (ep-1)/ep leave the rank: "
        f"{traffic.items[0].bytes_per_rank / 1e6:.1f} MB for 4096 tokens of Mixtral on 8 ranks in "
        "bf16. Tensor parallelism sends ep/e times as much for the same tokens. Beside the "
        "experts' compute only their width f counts: narrow experts wait for the network.\n\n"
        "It saves weights and gradients, ep times; not the optimizer under ZeRO, since only N/ep "
        f"ranks have the same experts. Mixtral on 64 GPUs with ep = 8 takes {gb:.2f} GB under "
        "ZeRO-1.\n\n"
        "What goes wrong: an uneven router, since all wait for the busiest rank, or tokens are "
        "dropped; and the gradients. An expert's is summed over its group by the all-to-all, so "
        "sum it over its replicas and divide by all N. The mean over the replicas is ep times too "
        "large, and nothing fails."
    )


def _layout():
    config, fleet = pl.model("llama-3-70b"), pl.cluster("hgx-h100", 64)
    found = pl.search(config, fleet, 8192, 1024)
    best = found.best
    states = 16 * config.n_params / 1e12
    return (
        f"First what must fit: 16 bytes x 70.6e9 are {states:.2f} TB of states, 14 cards of 80 GB "
        "and more, since activations, gathered layers and the optimizer's temporaries come on top. "
        "So the model or its states must be cut: ZeRO cuts states for bytes that travel beside "
        "compute; tensor parallelism cuts layers and activations for bytes on the critical path, "
        "so it stays in the node; a pipeline cuts layers for little traffic and a bubble; context "
        "parallelism cuts long sequences.\n\n"
        "Then price each item: products, attention, launches, what collectives expose, the bubble. "
        f"On 512 H100s, 1024 sequences of 8192, {found.considered:,} layouts are possible; the "
        f"best by the planner is {best.layout}: {best.seconds:.1f} s, MFU {best.mfu:.0%}, "
        f"{best.peak_bytes / 1e9:.0f} GB. {len(found.near_ties)} are within 2% of it, less than "
        "the estimate's own error of about 6% on runs that it never saw. So take the simplest of "
        "them, and measure two."
    )


def _one_gpu():
    gpt2 = pl.model("gpt2")
    plain, full = (
        pl.autocast_memory(gpt2, 4, sequence=1024, recompute=how) for how in ("none", "full")
    )
    logits = sum(item.bytes[2] for item in plain.items if "logits" in item.name)
    return (
        "First what lasts: under AdamW and autocast 4 bytes of weights, 4 of gradients and 8 of "
        f"moments a parameter, {plain.after_step / 1e9:.2f} GB for GPT-2 124M. Then what a step "
        "adds, and when: activations of every layer, some 40 sbh in eager PyTorch; the logits, "
        "with 12 bytes each in the loss's backward; 16-bit casts; the optimizer's temporaries. "
        "Moments differ, so add up each, and take the fullest. With 4 sequences of 1024 it is the "
        f"loss's backward: {plain.peak / 1e9:.2f} GB, {logits / plain.peak:.0%} of it logits.\n\n"
        "Then measure: a warm-up step, reset_peak_memory_stats, one step, max_memory_allocated. "
        "The same steps on fake tensors show every byte without a card; a card adds rounding and "
        "workspaces. A sweep over tokens gives a line: the intercept is states and casts, the "
        "slope is activations.\n\n"
        f"Checkpointing moves the layers' row to a tenth and the peak to {full.peak / 1e9:.2f} GB; "
        "the logits stay. Half a billion parameters have 7.9 GB of states: on 8 GB shrink those, "
        "with 8-bit moments or LoRA."
    )


def _one_card_fsdp():
    gpt2 = pl.model("gpt2")
    size = {"micro_batch": 4, "sequence": 1024}
    plain, sharded = pl.autocast_memory(gpt2, **size), pl.fsdp_memory(gpt2, **size)
    away = pl.fsdp_memory(gpt2, **size, offload=True)
    more = (sharded.peak - plain.peak) / 1e6
    cost = pl.offload_seconds(gpt2, 15.75e9, 15.75e9, 2e8)
    return (
        "With one rank a shard is the whole weight, so between steps the memory is the plain "
        "model's, 16 bytes a parameter. At the peak it is more: each unit computes with a gathered "
        "copy, and the root's copy stays from forward to the end of backward, "
        f"{more:.0f} MB for GPT-2 124M. So ask of any figure whether it is from between the steps "
        "or from the peak.\n\n"
        "CPUOffloadPolicy moves weights, gradients and moments to the host. The peak falls by 12 "
        f"bytes a parameter, from {sharded.peak / 1e9:.2f} to {away.peak / 1e9:.2f} GB: gradients "
        "are not there at that moment, activations and logits stay. The price is time: weights go "
        "up twice, gradients come down, and the host runs AdamW. Over PCIe 3.0 and at 200 million "
        f"parameters a second that is {1e3 * cost.optimizer:.0f} ms that cannot hide and "
        f"{1e3 * (cost.total - cost.optimizer):.0f} ms that may. It is the same for any batch, so "
        "a large batch pays for it best.\n\n"
        "On N cards the states are 16 Psi/N; check them, the layers cut over cards and the link's "
        "speed with torchrun before you trust a plan."
    )


PROMPTS = (
    Prompt(1, "Why is the ring all-reduce bandwidth-optimal, and why 2 (N-1) steps?", _ring),
    Prompt(
        2,
        "Why does averaging gradients equal the serial step, and what breaks if one rank's "
        "gradient is dropped or counted twice?",
        _averaging,
    ),
    Prompt(
        3,
        "Column or row parallel: which needs communication, and why does tensor parallelism stay "
        "inside one node?",
        _column_row,
    ),
    Prompt(4, "Walk up the ZeRO stages: what does each one save, and what does it cost?", _zero),
    Prompt(6, "What is the pipeline bubble, and how do you shrink it?", _bubble),
    Prompt(6, "Map a 3D-parallel job onto a cluster of 8 nodes.", _cluster),
    Prompt(
        7,
        "Sequence and context parallelism: what does each cut, what does it send, and when is the "
        "ring free?",
        _context,
    ),
    Prompt(
        8,
        "Expert parallelism: what does it send, what does it save, and what can go wrong?",
        _experts,
    ),
    Prompt(9, "Size a 70B run on 512 GPUs: how do you choose its layout?", _layout),
    Prompt(
        10,
        "Predict the memory of a training step on one GPU: what do you add up, and how do you "
        "check it?",
        _one_gpu,
    ),
    Prompt(11, "What does FSDP do on a single GPU, and what does offloading cost?", _one_card_fsdp),
)
