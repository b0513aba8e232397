"""The "Check yourself" questions, chapter by chapter; parlab computes the answers."""

from math import exp

import parlab as pl
from parlab.exercises.records import Question

_GB = 1e9


def _ring(n):
    return pl.all_reduce_cost(n, 1e9, pl.Link(0, 1))


def _ring_gb(n):
    return _ring(n).bytes_per_rank / _GB


def _leaving(schedule, local=8):
    """Bytes that leave each node, in units of S."""
    return pl.bytes_leaving_nodes(schedule, 1, local)[0] / schedule.n_chunks


_COLLECTIVES = (
    Question(
        chapter=1,
        text="A ring all-reduce of 1 GB on 8 GPUs: how many GB does each GPU send?",
        unit="GB",
        answer=lambda: _ring_gb(8),
        why=lambda: "2 (N-1)/N S: two phases of 7 steps, each with an eighth of the buffer.",
        replies=(
            (2, "That is the limit for many GPUs. A rank keeps one of its N chunks in each phase."),
            (0.875, "That is one phase. After the reduce-scatter comes the all-gather."),
            (14, "14 steps it is, but each moves one chunk of 1/8 GB."),
            (3.5, "Sent or received, not both together."),
            (7, "Gathering on one rank would bring that much to it; a ring spreads it."),
        ),
    ),
    Question(
        chapter=1,
        text="The same 1 GB on 64 GPUs: how many GB does each GPU send?",
        unit="GB",
        tolerance=0.002,
        answer=lambda: _ring_gb(64),
        why=lambda: f"With 8 GPUs it was {_ring_gb(8):.2f}: it nears 2 S and never reaches it.",
        replies=(
            (lambda: 8 * _ring_gb(8), "More GPUs make the chunks smaller, not the traffic larger."),
            (2, "Near, but a rank keeps one chunk of 1/64 in each phase."),
        ),
    ),
    Question(
        chapter=1,
        text="What does grow with the number of GPUs in a ring all-reduce of a fixed size?",
        choices={
            "a": "the bytes that each GPU sends",
            "b": "the number of steps, and with it the latency",
            "c": "the size of one message",
            "d": "nothing",
        },
        answer="b",
        why=lambda: f"{_ring(8).steps} steps for 8 GPUs, {_ring(64).steps} for 64.",
        replies=(
            ("a", "They are 2 (N-1)/N S: from 1.75 to 1.97 GB, near their limit of 2 S."),
            ("c", "A message is one chunk, S/N: it shrinks."),
            ("d", "Every step waits for the one before it. How many are there?"),
        ),
    ),
    Question(
        chapter=1,
        text="1 MB on 8 GPUs, 5 µs a message, 50 GB/s: ring or pipelined tree?",
        choices={"a": "the ring is faster", "b": "the tree is faster", "c": "equally fast"},
        answer="b",
        why=lambda: (
            "The ring wins only above "
            + pl.format_bytes(pl.ring_tree_crossover_bytes(8, pl.Link(5e-6, 50e9)))
            + "; below, its 14 start-ups cost more than the tree's 6."
        ),
        replies=(
            ("a", "Compare 14 times 5 µs with the time for the bytes, about 35 µs."),
            ("c", "There is one size at which they are equal. Is it 1 MB?"),
        ),
    ),
    Question(
        chapter=1,
        text="2 nodes of 8 GPUs, a flat ring over all 16: how many S leave each node?",
        unit="S",
        answer=lambda: _leaving(pl.ring_all_reduce_schedule(16)),
        why=lambda: (
            f"In three stages it is {_leaving(pl.hierarchical_schedule(2, 8)):g} S, and spread "
            "over 8 network cards."
        ),
        replies=(
            (1, "That is the all-reduce in three stages, on 2 nodes."),
            (15, "Only one of the 8 GPUs has its right neighbour in the other node."),
            (30, "Only one of the 8 GPUs has its right neighbour in the other node."),
        ),
    ),
)

_DATA_PARALLEL = (
    Question(
        chapter=2,
        text="Each DDP rank takes the mean loss over its own non-padding tokens, and ranks have "
        "different numbers of them. What is wrong with averaging these gradients?",
        choices={
            "a": "nothing: a mean of means is the mean",
            "b": "tokens on ranks with few of them weigh more",
            "c": "tokens on ranks with many of them weigh more",
            "d": "the gradient is N times too large",
        },
        answer="b",
        why=lambda: "Each rank has weight 1/N, however few tokens share it.",
        replies=(
            ("a", "Only if all means are over equally many."),
            ("c", "All ranks weigh the same. So who shares a rank's weight with fewer others?"),
            ("d", "DDP divides by N. The weights are wrong, not the scale."),
        ),
    ),
    Question(
        chapter=2,
        text="Rank 0 has 2 tokens with mean loss 1, rank 1 has 8 with mean loss 4. What is the "
        "mean loss per token?",
        answer=lambda: pl.token_weighted_mean([1, 4], [2, 8]),
        why=lambda: "(2 x 1 + 8 x 4) / 10; the mean of means is 2.5.",
        replies=(
            (2.5, "That is the mean of means. 8 tokens should count four times as much as 2."),
            (0.5, "The losses are means already: multiply each by its tokens."),
            (6.8, "Divide by all tokens, once."),
            (1.7, "Divide by all tokens, once; not by the ranks as well."),
        ),
    ),
    Question(
        chapter=2,
        text="Ranks have different numbers of tokens: what is the fix?",
        choices={
            "a": "a smaller learning rate",
            "b": "pad all ranks to the same length and include the padding",
            "c": "sum the loss over tokens, and divide by the tokens of all ranks",
            "d": "weigh each rank by its number of sequences",
        },
        answer="c",
        why=lambda: "All-reduce the token count too; and if DDP divides by N, multiply by N.",
        replies=(
            ("a", "The weights between tokens stay wrong."),
            ("b", "Then the model learns to predict padding."),
            ("d", "Sequences have different numbers of tokens as well."),
        ),
    ),
    Question(
        chapter=2,
        text="10 items on 4 ranks, with a sampler that repeats items until all ranks have equally "
        "many: how many items does an epoch visit?",
        answer=lambda: pl.padded_elements(10, 4),
        tolerance=0,
        why=lambda: (
            "Two items count twice; with drop_last it would be 8, and two would be missing."
        ),
        replies=(
            (10, "4 does not divide 10, and all ranks must take equally many steps."),
            (8, "That is drop_last: it leaves items out."),
            (3, "That is one rank's share."),
        ),
    ),
    Question(
        chapter=2,
        text="A port of your training code needs a learning rate of exactly 1/8 on 8 GPUs to do "
        "the same. What is your guess?",
        choices={
            "a": "it sums gradients and does not average them",
            "b": "it averages twice",
            "c": "one rank's gradient is dropped",
            "d": "the ranks see the same data",
        },
        answer="a",
        why=lambda: "8 times too large, with SGD. Adam divides the scale out, and nobody notices.",
        replies=(
            ("b", "Then the steps would be too small."),
            ("c", "Then they would be 7/8 as long, and not in quite the right direction."),
            ("d", "Then the mean would have the right scale."),
        ),
    ),
)

_EXAMPLE = {"hidden": 4096, "sequence": 4096, "micro_batch": 1, "tp": 8}


def _layer(link="nvlink-4", **more):
    wire = pl.Link(0, pl.link(link).bandwidth_bytes_per_s)
    return pl.tensor_parallel_traffic(**_EXAMPLE, link=wire, **more)


_TENSOR_PARALLEL = (
    Question(
        chapter=3,
        text="Why is the first matrix of the MLP cut by columns and the second by rows?",
        choices={
            "a": "because the first matrix is wider than tall",
            "b": "columns leave complete entries for GeLU, and just the inputs that the rows need",
            "c": "because rows of the first matrix would not fit on a GPU",
            "d": "the other order works as well",
        },
        answer="b",
        why=lambda: (
            "One all-reduce is left. The other order has partial sums before GeLU, and gelu(1) + "
            f"gelu(1) is {2 * pl.gelu(1.0):.2f}, gelu(2) {pl.gelu(2.0):.2f}."
        ),
        replies=(
            ("a", "The shapes do not decide it. What does GeLU need?"),
            ("c", "Both cuts leave 1/n of the matrix on a GPU."),
            ("d", "It needs an all-reduce before GeLU, which cannot act on partial sums."),
        ),
    ),
    Question(
        chapter=3,
        text="Why does tensor parallelism usually stay inside a node, while data parallelism spans "
        "nodes?",
        choices={
            "a": "it sends more bytes in a step",
            "b": "its all-reduces are waited for, several a layer; data parallelism's overlap",
            "c": "nodes have different weights",
            "d": "InfiniBand cannot all-reduce activations",
        },
        answer="b",
        why=lambda: (
            f"Per micro-batch of the chapter's example: {1e3 * _layer(n_layers=32).seconds:.0f} ms "
            f"over NVLink, {1e3 * _layer('infiniband-400g', n_layers=32).seconds:.0f} ms over one "
            "InfiniBand port."
        ),
        replies=(
            ("a", "It may send fewer. When are they sent, and who waits?"),
            ("c", "Tensor-parallel ranks always have different weights."),
            ("d", "It can. How long does it take?"),
        ),
    ),
    Question(
        chapter=3,
        text="A layer's forward and backward with full activation checkpointing: how many "
        "all-reduces?",
        tolerance=0,
        answer=lambda: _layer(recompute=True).count,
        why=lambda: f"{_layer().count} without: the second forward has its two as well.",
        replies=(
            (4, "That is without recomputation: two in forward, two in backward."),
            (2, "Attention and MLP have one each, in forward and in backward."),
            (8, "Only the forward runs a second time."),
        ),
    ),
    Question(
        chapter=3,
        text="A bias is added on each of 8 tensor-parallel ranks before the all-reduce of a "
        "row-parallel layer. How often is it in the result?",
        tolerance=0,
        answer=lambda: sum(float(pl.row_parallel([[0]], [[[0]]], [1])[0]) for _ in range(8)),
        why=lambda: "Add it after the sum, or on one rank.",
        replies=((1, "The all-reduce adds up what each rank has, its bias included."),),
    ),
    Question(
        chapter=3,
        text="A column-parallel layer whose output stays split: what does it communicate?",
        choices={
            "a": "nothing at all",
            "b": "nothing in forward, an all-reduce of the input's gradient in backward",
            "c": "an all-gather in forward, nothing in backward",
            "d": "an all-reduce in forward and in backward",
        },
        answer="b",
        why=lambda: "Each rank's share of the gradient of x is a partial sum.",
        replies=(
            ("a", "In forward. What does each rank know of the gradient of x?"),
            ("c", "The gather is needed only if somebody wants the output whole."),
            ("d", "In forward every rank has complete columns."),
        ),
    ),
)

_STATES = (
    Question(
        chapter=4,
        text="A 7B model on 8 GPUs, mixed-precision Adam: GB of model states per GPU under ZeRO-2?",
        unit="GB",
        answer=lambda: pl.zero_memory_bytes(7e9, 8, 2) / _GB,
        why=lambda: "2 Psi + 14 Psi / 8.",
        replies=(
            (14, "That is ZeRO-3. Under ZeRO-2 the weights stay whole."),
            (
                38.5,
                "That is ZeRO-1, or 4 + 4 + 8 bytes under ZeRO-2. Mixed precision has 2 + 2 + 12, "
                "and stage 2 cuts the gradients too.",
            ),
            (
                lambda: pl.zero_memory_bytes(7e9, 8, 2) / 2**30,
                "That is in GiB. 1 GB is 10^9 bytes.",
            ),
        ),
    ),
    Question(
        chapter=4,
        text="A 7B model on 8 GPUs, mixed-precision Adam: GB of model states per GPU under ZeRO-3?",
        unit="GB",
        answer=lambda: pl.zero_memory_bytes(7e9, 8, 3) / _GB,
        why=lambda: "16 Psi / 8. Activations and the gathered layers come on top.",
        replies=(
            (112, "That is without ZeRO."),
            (26.25, "That is ZeRO-2. Stage 3 cuts the weights too."),
            (lambda: 14e9 / 2**30, "That is in GiB. 1 GB is 10^9 bytes."),
        ),
    ),
    Question(
        chapter=4,
        text="What does ZeRO-3 cost, as a multiple of data parallelism's traffic? One micro-batch, "
        "weights and gradients of 2 bytes.",
        answer=lambda: pl.zero_traffic_bytes(7e9, 8, 3) / pl.zero_traffic_bytes(7e9, 8, 0),
        why=lambda: "All-gather, all-gather, reduce-scatter, where an all-reduce is one of each.",
        replies=(
            (1, "That is stages 1 and 2. Where do the weights come from in backward?"),
            (2, "A reduce-scatter or an all-gather is half an all-reduce. How many are there?"),
            (3, "Three collectives, but each is half an all-reduce."),
        ),
    ),
    Question(
        chapter=4,
        text="A 7B model on 8 GPUs under ZeRO-2, with gradients kept in fp32: GB per GPU?",
        unit="GB",
        answer=lambda: pl.zero_memory_bytes(7e9, 8, 2, grad_bytes=4) / _GB,
        why=lambda: "2 Psi + 16 Psi / 8.",
        replies=(
            (26.25, "That is with gradients of 2 bytes."),
            (40.25, "The larger gradients are cut by 8 as well."),
        ),
    ),
    Question(
        chapter=4,
        text="14 GB of bf16 gradients, 8 GPUs, 4 micro-batches a step: how many GB does each GPU "
        "send in a step under ZeRO-2?",
        unit="GB",
        answer=lambda: pl.zero_traffic_bytes(7e9, 8, 2, 4) / _GB,
        why=lambda: (
            f"4 reduce-scatters and one all-gather. ZeRO-1 sends "
            f"{pl.zero_traffic_bytes(7e9, 8, 1, 4) / _GB:g} GB: it can wait for the last."
        ),
        replies=(
            (24.5, "That is for one micro-batch, or for ZeRO-1. Stage 2 cannot wait."),
            (98, "The weights are gathered once a step only."),
            (147, "That is ZeRO-3."),
        ),
    ),
)


def _gpt3(recompute):
    config = pl.ModelConfig(layers=1, hidden=12288, heads=96, vocab=51200)
    return pl.activation_memory_bytes(config, 1, sequence=2048, recompute=recompute)


_SBH = 2048 * 12288

_STEP = (
    Question(
        chapter=5,
        text="GPT-3 (h = 12288, 96 heads), s = 2048: how many sbh bytes do attention's scores take "
        "in a layer, beside the other 34?",
        unit="sbh",
        answer=lambda: (_gpt3("none") - _gpt3("selective")) / _SBH,
        why=lambda: "5 a s / h.",
        replies=(
            (lambda: 5 * 2048 / 12288, "Each of the 96 heads has scores of its own."),
            (34, "That is all the rest."),
            (114, "That is with the other 34."),
            (16, "Five bytes a score: softmax, mask, and the output of dropout."),
        ),
    ),
    Question(
        chapter=5,
        text="34 sbh and 80 sbh of scores: which fraction is left with selective recomputation?",
        answer=lambda: _gpt3("selective") / _gpt3("none"),
        why=lambda: "34/114, for a few percent more computing.",
        replies=(
            (lambda: 80 / 114, "That is what goes."),
            (lambda: 2 / 114, "That is full recomputation."),
        ),
    ),
    Question(
        chapter=5,
        text="With a flash attention kernel, what does selective recomputation save?",
        choices={
            "a": "nearly nothing",
            "b": "the same 80 of 114",
            "c": "everything but the inputs of layers",
        },
        answer="a",
        why=lambda: "A flash kernel never writes the scores: there is no s^2 term left to drop.",
        replies=(
            ("b", "Which tensors does selective recomputation drop, and does a flash kernel keep?"),
            ("c", "That is full recomputation."),
        ),
    ),
    Question(
        chapter=5,
        text="70B parameters at 16 bytes, cut over 8 cards of 80 GB: how many GB of states has "
        "each card?",
        unit="GB",
        answer=lambda: pl.zero_memory_bytes(70e9, 8, 3) / _GB,
        why=lambda: (
            "More than the card holds, before any activation: two nodes of 8 are the least, with "
            f"{pl.zero_memory_bytes(70e9, 16, 3) / _GB:g} GB a card."
        ),
        replies=(
            (1120, "That is all of it: cut it over the 8 cards."),
            (17.5, "That is the weights only, 2 bytes a parameter."),
        ),
    ),
    Question(
        chapter=5,
        text="8192 tokens, a vocabulary of 151,936: how many GiB is one fp32 copy of the logits?",
        unit="GiB",
        answer=lambda: pl.logits_bytes(8192, 151_936) / 2**30,
        why=lambda: "And a copy in bf16 beside it, on the last pipeline stage.",
        replies=(
            (lambda: pl.logits_bytes(8192, 151_936) / 1e9, "That is in GB; this question has GiB."),
            (
                lambda: pl.logits_bytes(8192, 151_936, element_bytes=2) / 2**30,
                "That is in bf16. fp32 has 4 bytes.",
            ),
        ),
    ),
)


def _peak(schedule):
    return max(pl.simulate(schedule).peak_in_flight)


def _groups():
    from parlab.exercises.layout import map_3d_job

    return map_3d_job(tp=8, dp=2, pp=4)


_PIPELINE = (
    Question(
        chapter=6,
        text="8 stages, 16 micro-batches, 1F1B: which fraction of the time is idle?",
        answer=lambda: float(pl.simulate(pl.one_f_one_b(8, 16)).idle_fraction),
        why=lambda: "(p-1)/(m+p-1) = 7/23.",
        replies=(
            (7 / 16, "That is idle over ideal time. The share of the run is smaller."),
            (8 / 23, "The first stage starts at once: p - 1 wait."),
            (16 / 23, "That is the busy share."),
        ),
    ),
    Question(
        chapter=6,
        text="How can you make that smaller without another global batch?",
        choices={
            "a": "more stages",
            "b": "fewer, larger micro-batches",
            "c": "several chunks of layers a rank, or more and smaller micro-batches",
            "d": "1F1B instead of GPipe",
        },
        answer="c",
        why=lambda: (
            "With 2 chunks a rank it is "
            f"{pl.pipeline_bubble(8, 16, 2):.1%}, with 32 micro-batches "
            f"{pl.pipeline_bubble(8, 32):.1%}. Fewer stages help as well."
        ),
        replies=(
            ("a", "Each further stage is one more that waits."),
            ("b", "Then each stage waits longer for the first of them."),
            ("d", "Both have the same bubble; 1F1B holds fewer activations."),
        ),
    ),
    Question(
        chapter=6,
        text="8 stages, 64 micro-batches: how many micro-batches does the first stage hold at "
        "most, under 1F1B?",
        tolerance=0,
        answer=lambda: _peak(pl.one_f_one_b(8, 64)),
        why=lambda: f"As many as there are stages. GPipe holds {_peak(pl.gpipe(8, 64))}.",
        replies=(
            (64, "That is GPipe, which runs all forwards first."),
            (7, "It is 7 forwards ahead, and takes one more before the first backward."),
            (1, "That is the last stage."),
        ),
    ),
    Question(
        chapter=6,
        text="4 stages, 8 micro-batches, interleaved with 2 chunks a rank: which fraction of the "
        "time is idle?",
        answer=lambda: float(pl.simulate(pl.interleaved_1f1b(4, 8, 2)).idle_fraction),
        why=lambda: f"3/19. Without chunks it is 3/11, {3 / 11:.1%}, less than twice as much.",
        replies=(
            (3 / 22, "Idle over total does not fall by v: the total gets shorter as well."),
            (3 / 16, "That is idle over ideal time."),
            (3 / 11, "That is without chunks."),
        ),
    ),
    Question(
        chapter=6,
        text="A tool reports a bubble of 187.5% for 16 stages and 8 micro-batches. What did it "
        "divide by?",
        choices={
            "a": "the total time",
            "b": "the time of the work alone",
            "c": "the number of stages",
        },
        answer="b",
        why=lambda: f"15/8. Of the run {pl.pipeline_bubble(16, 8):.1%} is idle, 15/23.",
        replies=(
            ("a", "A share of the total is below 100%."),
            ("c", "(p-1)/p would be below 100% as well."),
        ),
    ),
    Question(
        chapter=6,
        text="A job with tp = 8, dp = 2, pp = 4 on 8 nodes of 8 GPUs, ranks in the order tp, dp, "
        "pp: how many nodes does a data-parallel group touch?",
        tolerance=0,
        answer=lambda: _groups()[1]["dp"],
        why=lambda: f"Its ranks are 8 apart: rank 0 and rank {_groups()[0]['dp'][0][1]}.",
        replies=(
            (1, "Its two members are a stride of tp = 8 apart."),
            (8, "It has two members."),
            (4, "That is a pipeline group."),
        ),
    ),
)


def _ring_mb(**changed):
    sizes = {"sequence": 65_536, "cp": 8, **changed}
    traffic = pl.context_parallel_traffic(pl.model("llama-3-8b"), 1, **sizes)
    return traffic.only(phase="forward").bytes_per_rank / 1e6


def _busiest(cp):
    return pl.causal_work(131_072, cp, balanced=False).imbalance


def _hidden_from(**changed):
    h100, wire = pl.gpu("h100-sxm"), pl.link("infiniband-400g")
    return pl.ring_hides_from(pl.model("llama-3-70b"), h100, wire, **changed)


_CONTEXT = (
    Question(
        chapter=7,
        text="What does sequence parallelism divide over the ranks that tensor parallelism leaves "
        "whole?",
        choices={
            "a": "what norms, attention and MLP read",
            "b": "keys and values",
            "c": "the weights of norms",
            "d": "the scores of attention",
        },
        answer="a",
        why=lambda: "Between the matrices a rank then has s/N tokens only, for the same bytes.",
        replies=(
            ("b", "Tensor parallelism divides them already, by heads."),
            ("c", "They stay whole on every rank, and their gradients must be summed."),
            ("d", "They are divided already, by heads, and a flash kernel keeps none."),
        ),
    ),
    Question(
        chapter=7,
        text="Llama 3 8B has 32 heads, 8 of keys and values, of size 128. 65,536 tokens on 8 ranks "
        "of a ring, bf16: how many MB does a rank send in one layer's forward?",
        unit="MB",
        answer=_ring_mb,
        why=lambda: (
            "7 hops of the keys and the values of 8192 tokens: 2 x 8192 x 8 x 128 x 2 bytes."
        ),
        replies=(
            (lambda: _ring_mb() * 8 / 7, "8 steps have 7 hops between them."),
            (lambda: _ring_mb() / 2, "Keys and values, two tensors."),
            (lambda: _ring_mb() * 4, "Only the 8 heads of keys and values travel."),
            (lambda: _ring_mb() * 3, "That is forward and backward."),
            (lambda: _ring_mb() / 7, "That is one hop; there are 7."),
            (lambda: _ring_mb() * 8, "Each rank has 1/8 of the tokens."),
        ),
    ),
    Question(
        chapter=7,
        text="A row has seen the largest score M = 2 and the sum l = 1.5. A block brings a score "
        "of 5. What is left of the old sum, before the block's own part is added?",
        tolerance=0.005,
        answer=lambda: 1.5 * exp(2 - 5),
        why=lambda: "1.5 e^(2-5): exponentials are now measured from 5.",
        replies=(
            (1.5, "It was measured from M = 2; now the largest score is 5."),
            (lambda: 1.5 * exp(3), "The other way: e^(old - new) is below 1."),
            (lambda: 1 + 1.5 * exp(-3), "That is with the block's own e^(5-5) = 1."),
        ),
    ),
    Question(
        chapter=7,
        text="A long causal sequence in 4 equal pieces, one a rank: the busiest rank's work over "
        "the mean?",
        answer=lambda: _busiest(4),
        why=lambda: "2 - 1/cp: the last rank sees almost everything, the mean is half of that.",
        replies=(
            (2, "That is the limit of many ranks."),
            (4, "The last rank does 7 of 16 parts, not all."),
            (lambda: _busiest(8), "That is for 8 ranks."),
            (1, "That is what the zigzag reaches."),
            (7, "7 times the first rank's work; over the mean?"),
        ),
    ),
    Question(
        chapter=7,
        text="64 heads, 8 of keys and values. H100s at 40% of 989.4 TFLOP/s, 50 GB/s a card, bf16, "
        "causal with a zigzag: from how many tokens a rank on does the ring hide in forward?",
        unit="tokens",
        answer=_hidden_from,
        why=lambda: "w (k/a) F/B = 2 x 8/64 x 395.8e12 / 50e9.",
        replies=(
            (lambda: 8 * _hidden_from(), "That is with keys of its own for each head."),
            (lambda: _hidden_from(causal=False), "In a causal step only half a block is computed."),
            (lambda: _hidden_from(efficiency=1.0), "At 40% of the peak compute takes longer."),
        ),
    ),
    Question(
        chapter=7,
        text="32 heads, 8 of keys and values, tensor parallelism of 2: over how many ranks can "
        "Ulysses cut the sequence without copies of heads?",
        tolerance=0,
        answer=lambda: pl.model("llama-3-8b").kv_heads // 2,
        why=lambda: "Each rank needs a whole key-value head, and tensor parallelism left 4.",
        replies=(
            (8, "Tensor parallelism has taken half of the heads already."),
            (16, "Queries have so many; there are fewer keys and values."),
            (32, "Queries have so many; there are fewer keys and values."),
        ),
    ),
)


def _mixtral_gb(expert_parallel):
    mixtral = pl.model("mixtral-8x7b")
    return pl.expert_zero_memory_bytes(mixtral, 64, 1, expert_parallel=expert_parallel) / _GB


def _dispatch_mb():
    traffic = pl.expert_parallel_traffic(pl.model("mixtral-8x7b"), 2, sequence=4096, ep=8)
    return traffic.items[0].bytes_per_rank / 1e6


_EXPERTS = (
    Question(
        chapter=8,
        text="Mixtral-8x7B (46.7e9 parameters, 45.1e9 of them in experts) on 64 GPUs, expert "
        "parallelism of 8, ZeRO-1: how many GB of model states has a GPU?",
        unit="GB",
        tolerance=0.005,
        answer=lambda: _mixtral_gb(8),
        why=lambda: (
            "4 bytes for each of 7.24e9 parameters, and 12 for 1/64 of the shared ones and for "
            "1/8 of a rank's experts: only 8 ranks have the same."
        ),
        replies=(
            (30.33, "A rank's experts have 8 replicas, not 64: only these share their states."),
            (lambda: _mixtral_gb(1), "That is with all experts on every GPU."),
            (
                lambda: pl.zero_memory_bytes(pl.model("mixtral-8x7b").n_active_params, 64, 1) / _GB,
                "All experts are stored, also those that a token does not visit.",
            ),
        ),
    ),
    Question(
        chapter=8,
        text="h = 4096, 8192 tokens a GPU, 2 of 8 experts for each, expert parallelism of 8, bf16, "
        "even routing: how many MB does a GPU send in one dispatch?",
        unit="MB",
        answer=_dispatch_mb,
        why=lambda: "8192 x 2 copies of 4096 x 2 bytes, of which 7/8 go to other ranks.",
        replies=(
            (lambda: _dispatch_mb() * 8 / 7, "One copy of eight is for an expert at home."),
            (lambda: _dispatch_mb() / 2, "Each token goes to two experts."),
            (lambda: _dispatch_mb() * 4, "That is all four all-to-alls of a layer."),
            (lambda: _dispatch_mb() * 2, "bf16 has 2 bytes; or you counted the way back too."),
        ),
    ),
    Question(
        chapter=8,
        text="On a given card, link and group, what decides how long the all-to-alls take beside "
        "the experts' own compute?",
        choices={
            "a": "the hidden size h",
            "b": "the number of experts that a token visits",
            "c": "the width f of one expert",
            "d": "the number of tokens",
        },
        answer="c",
        why=lambda: "A copy is h numbers and takes FLOP in proportion to h f: the rest cancels.",
        replies=(
            ("a", "Bytes and FLOP both grow with h."),
            ("b", "Each visit costs its bytes and its FLOP."),
            ("d", "Both grow with it, latency apart."),
        ),
    ),
    Question(
        chapter=8,
        text="8 ranks in 2 groups of ep = 4. Each expert's gradient is averaged over the 2 ranks "
        "that hold it. By which factor is it too large?",
        tolerance=0,
        answer=lambda: 4,
        why=lambda: (
            "The all-to-all of backward has summed over 4 ranks already, so the sum has 8 ranks in "
            "it and was divided by 2."
        ),
        replies=(
            (1, "That would be right if each rank had sent its experts its own tokens only."),
            (8, "It was divided by 2."),
            (2, "That is the number of replicas, by which it was divided."),
            (0.25, "Too large, not too small: it sums over more ranks than it is divided by."),
        ),
    ),
    Question(
        chapter=8,
        text="1024 tokens visit 2 of 8 experts each, with a capacity factor of 1.25. For how many "
        "copies does an expert have room?",
        tolerance=0,
        answer=lambda: pl.expert_capacity(1024, 8, 2, 1.25),
        why=lambda: "1.25 x 1024 x 2 / 8.",
        replies=(
            (160, "Each token brings two copies."),
            (256, "That is the mean; the factor leaves a quarter more room."),
            (1280, "That is for all tokens at one expert; they spread over 8."),
        ),
    ),
    Question(
        chapter=8,
        text="Four ranks of experts get 30, 10, 10 and 10 copies. By which factor does the layer "
        "take longer than with even routing?",
        answer=lambda: pl.imbalance([30, 10, 10, 10]),
        why=lambda: "It waits for the busiest: 30 over the mean of 15.",
        replies=(
            (3, "With even routing each would get 15, not 10."),
            (1.5, "30 over what? The mean of the four is 15."),
            (1, "The sum is the same, but all wait for the busiest rank."),
        ),
    ),
)


def _replicas(world, **degrees):
    return world // pl.Layout(**degrees).world


def _least_nodes():
    config, nodes = pl.model("llama-2-70b"), 1
    while not pl.search(config, pl.cluster("hgx-h100", nodes), 4096, 64, foreach=False).best:
        nodes += 1
    return nodes


_LAYOUT = (
    Question(
        chapter=9,
        text="512 GPUs, tp = 8, pp = 4, cp = 2, ep = 8: how many data-parallel ranks are there?",
        tolerance=0,
        answer=lambda: _replicas(512, tp=8, pp=4, cp=2),
        why=lambda: "512 / (8 x 4 x 2). ep is no factor: experts spread over ranks that exist.",
        replies=(
            (1, "ep is no factor of the world: experts spread over the dp x cp ranks."),
            (16, "Context-parallel ranks are different GPUs as well."),
            (64, "Of these, pp and cp take their part."),
        ),
    ),
    Question(
        chapter=9,
        text="Why does tensor parallelism stay inside a node, while data parallelism spans nodes?",
        choices={
            "a": "data parallelism sends fewer bytes in all",
            "b": "its collectives stand between matrix products, many times per micro-batch; "
            "gradients travel once, beside compute",
            "c": "NCCL cannot all-reduce activations across nodes",
        },
        answer="b",
        why=lambda: "It is not the bytes alone but what waits for them.",
        replies=(
            ("a", "Not always: gradients of a large model are more bytes than its activations."),
            ("c", "It can. What does the GPU do meanwhile?"),
        ),
    ),
    Question(
        chapter=9,
        text="How many nodes of 8 H100s (80 GB) does Llama-2-70B need at least to train on "
        "sequences of 4096, 64 an iteration, with a fused Adam and any layout of this chapter?",
        tolerance=0,
        answer=_least_nodes,
        why=lambda: "16 bytes x 69e9 over 16 cards are 69 GB; 8 cards would need 138 GB each.",
        replies=(
            (1, "Compute the states per card first."),
            (4, "With full recomputation or small micro-batches fewer will do."),
        ),
    ),
    Question(
        chapter=9,
        text="A planner predicts 17.8 s for one layout and 18.0 s for another; its mean error on "
        "runs it never saw is 6%. Which is faster?",
        choices={
            "a": "the first",
            "b": "the second",
            "c": "it cannot tell: take the simpler one, or measure both",
        },
        answer="c",
        why=lambda: "They differ by 1%. Errors of similar layouts are alike, but not that alike.",
        replies=(
            ("a", "By 1%, with an error of 6%?"),
            ("b", "Why should it be?"),
        ),
    ),
    Question(
        chapter=9,
        text="An H100 has 3.2 times the FLOP/s of an A100. Why does it reach a smaller share of "
        "its peak in the same matrix product?",
        choices={
            "a": "its kernels launch more slowly",
            "b": "shared memory and main memory have only about 1.7 times the bandwidth",
            "c": "bf16 is slower than fp16 on it",
        },
        answer="b",
        why=lambda: "Operands must come to the tensor cores; the formula's second and third term.",
        replies=(
            ("a", "A launch takes about as long on both, and large products hide it."),
            ("c", "Both have the same rate."),
        ),
    ),
)


def _gpt2_step(micro_batch=1, **options):
    return pl.autocast_memory(pl.model("gpt2"), micro_batch, sequence=1024, **options)


def _kept_by_checkpointing():
    """The share of a layer's bytes that full recomputation keeps, under eager autocast."""
    none, full = (
        next(i.bytes[1] for i in _gpt2_step(recompute=how).items if i.name == "layers")
        for how in ("none", "full")
    )
    return full / none


def _most_sequences(room):
    fixed, each = pl.activation_line(pl.model("gpt2"), sequence=1024)
    return (room - fixed) // each


_ONE_GPU = (
    Question(
        chapter=10,
        text="GPT-2 has 124,439,808 parameters. How many GB does a card hold between two steps of "
        "AdamW under autocast, gradients included?",
        unit="GB",
        answer=lambda: 16 * pl.model("gpt2").n_params / _GB,
        why=lambda: "4 bytes of weights, 4 of gradients, 8 of moments for each parameter.",
        replies=(
            (lambda: 12 * 0.124439808, "Gradients are still there until zero_grad frees them."),
            (lambda: 4 * 0.124439808, "Those are the weights alone."),
            (lambda: 8 * 0.124439808, "AdamW keeps two moments besides, 8 bytes."),
            (lambda: 20 * 0.124439808, "The optimizer's temporaries are gone after its step."),
        ),
    ),
    Question(
        chapter=10,
        text="8192 tokens, a vocabulary of 50,257, PyTorch's cross_entropy in fp32: how many GB do "
        "the log-softmax and the gradients of the logits take in the loss's backward?",
        unit="GB",
        answer=lambda: 3 * pl.logits_bytes(8192, 50257) / _GB,
        why=lambda: "Three fp32 tensors of that size, 12 bytes a logit.",
        replies=(
            (lambda: pl.logits_bytes(8192, 50257) / _GB, "One tensor; backward makes two more."),
            (lambda: 2 * pl.logits_bytes(8192, 50257) / _GB, "Backward makes two gradients."),
            (lambda: pl.logits_bytes(8192, 50257) / _GB / 2, "That is one copy in 16 bits."),
        ),
    ),
    Question(
        chapter=10,
        text="Full checkpointing under eager autocast: which part of a layer's kept bytes remains "
        "for GPT-2 (h = 768, 12 heads)? A fraction of 1.",
        answer=_kept_by_checkpointing,
        why=lambda: "The layer's input in fp32, 4 sbh of some 40.",
        replies=(
            (1 / 16, "That is 2 of 32 sbh, where all is in 16 bits. The input here is in fp32."),
            (2 / 34, "That is the papers' 2 of 34 sbh, with dropout and 16 bits throughout."),
            (0, "The layer's input must be there to begin again."),
            (0.05, "2 of 40: but the input is in fp32."),
        ),
    ),
    Question(
        chapter=10,
        text="Checkpointing cut the layers' activations to a tenth, but GPT-2's peak by a quarter "
        "only. Why?",
        choices={
            "a": "the recomputed layer is in the peak",
            "b": "states, logits and the logits' gradients did not move, and they were most of it",
            "c": "the allocator keeps the freed blocks",
        },
        answer="b",
        why=lambda: "The peak is in the loss's backward, before any layer is computed again.",
        replies=(
            ("a", "At the peak no layer has been recomputed yet; and one layer is a twelfth."),
            ("c", "It does, but max_memory_allocated counts what tensors hold."),
        ),
    ),
    Question(
        chapter=10,
        text="A sweep of GPT-2 fits a peak of 1.740 GB + 0.977 MB a token. A card has 8.0 GB of "
        "room. How many sequences of 1024 tokens fit?",
        tolerance=0,
        answer=lambda: _most_sequences(8e9),
        why=lambda: "(8.0 - 1.740) GB over 1.0006 GB a sequence, rounded down.",
        replies=(
            (7, "Seven need 8.74 GB."),
            (8, "The states and casts, 1.74 GB, do not wait."),
            (5, "One more fits."),
        ),
    ),
    Question(
        chapter=10,
        text="494,032,768 parameters with fp32 weights and gradients, and moments in 8 bits: how "
        "many GB of model states?",
        unit="GB",
        answer=lambda: (
            pl.BYTE_RECIPES["8-bit-adam"].total * pl.model("qwen2.5-0.5b").n_params / _GB
        ),
        why=lambda: "4 + 4 + 2 bytes a parameter; the scales of the 8-bit blocks are small.",
        replies=(
            (lambda: 16 * 0.494032768, "That is with moments in fp32, 8 bytes for both."),
            (lambda: 9 * 0.494032768, "There are two moments, one byte each."),
            (lambda: 6 * 0.494032768, "The weights and the gradients stay in fp32 here."),
        ),
    ),
    Question(
        chapter=10,
        text="nvidia-smi shows 7.1 GB, max_memory_allocated 5.8 GB. Which one is held against the "
        "prediction of tensors?",
        choices={
            "a": "nvidia-smi: that is what the card really uses",
            "b": "max_memory_allocated, after reset_peak_memory_stats",
            "c": "the mean of both",
        },
        answer="b",
        why=lambda: "nvidia-smi adds what the allocator keeps, CUDA's context and others' memory.",
        replies=(
            ("a", "It is what must fit, but it holds more than tensors."),
            ("c", "They count different things."),
        ),
    ),
)


def _root_params():
    gpt2 = pl.model("gpt2")
    return gpt2.n_params - gpt2.layers * gpt2.layer_params


_FSDP_ON_A_GPU = (
    Question(
        chapter=11,
        text="fully_shard on one card: how does its memory between two steps compare with the "
        "plain model's?",
        choices={
            "a": "it is smaller, since optimizer states are sharded",
            "b": "it is the same",
            "c": "it is larger by the gathered weights",
        },
        answer="b",
        why=lambda: "One rank's shard is the whole weight, and gathered copies are gone.",
        replies=(
            ("a", "Over how many ranks?"),
            ("c", "Those are there during the step, not after it."),
        ),
    ),
    Question(
        chapter=11,
        text="GPT-2's root unit: embedding 50,257 x 768, positions 1024 x 768, a norm of 2 x 768. "
        "By how many MB does fully_shard in fp32 raise the peak at N = 1?",
        unit="MB",
        answer=lambda: 4 * _root_params() / 1e6,
        why=lambda: "The root's weights are there twice from forward to the end of backward.",
        replies=(
            (lambda: 2 * _root_params() / 1e6, "It gathers in fp32 unless told otherwise."),
            (lambda: 4 * 0.124439808e3, "Blocks are gathered one by one and freed."),
            (lambda: 4 * 50257 * 768 / 1e6, "Positions and the last norm are in no block either."),
            (0, "That is the difference between steps."),
        ),
    ),
    Question(
        chapter=11,
        text="CPUOffloadPolicy, AdamW, fp32: by how many bytes a parameter does the peak in the "
        "loss's backward fall?",
        tolerance=0,
        answer=lambda: 12,
        why=lambda: "Weights 4 and moments 8. There are no gradients at that moment.",
        replies=(
            (16, "At that moment zero_grad has freed the gradients and backward made none yet."),
            (8, "The weights move too."),
            (4, "AdamW's moments move too."),
        ),
    ),
    Question(
        chapter=11,
        text="Which part of offloading's cost in time cannot hide behind the card's computing?",
        choices={
            "a": "the weights' way to the card",
            "b": "the gradients' way to the host",
            "c": "the optimizer on the host",
        },
        answer="c",
        why=lambda: "It waits for the last gradient, and the next forward waits for it.",
        replies=(
            ("a", "The next block's weights can travel while this block computes."),
            ("b", "All but the last can travel while backward goes on."),
        ),
    ),
    Question(
        chapter=11,
        text="GPT-2, 124,439,808 parameters in blocks of 85,054,464 together: how many MB go up to "
        "the card in a step under CPUOffloadPolicy, in fp32?",
        unit="MB",
        answer=lambda: 4 * (2 * pl.model("gpt2").n_params - _root_params()) / 1e6,
        why=lambda: "Blocks twice, for forward and backward; the root once.",
        replies=(
            (lambda: 4 * 0.124439808e3, "Blocks are freed after forward and needed in backward."),
            (lambda: 8 * 0.124439808e3, "The root stays from forward to backward: once."),
        ),
    ),
    Question(
        chapter=11,
        text="A T4 multiplies two matrices of 4096 x 4096 in 5 ms. Which share of its 65 TFLOP/s "
        "is that?",
        answer=lambda: 2 * 4096**3 / 5e-3 / pl.gpu("t4").fp16_flop_per_s,
        why=lambda: "2 n^3 FLOP: a multiplication and an addition for each of n^3 pairs.",
        replies=(
            (lambda: 4096**3 / 5e-3 / 65e12, "Each of the n^3 products is added too: 2 n^3."),
            (lambda: 2 * 4096**2 / 5e-3 / 65e12, "An element of the result takes n products."),
        ),
    ),
)

_ALL = (
    _COLLECTIVES,
    _DATA_PARALLEL,
    _TENSOR_PARALLEL,
    _STATES,
    _STEP,
    _PIPELINE,
    _CONTEXT,
    _EXPERTS,
    _LAYOUT,
    _ONE_GPU,
    _FSDP_ON_A_GPU,
)

QUESTIONS = {
    f"{question.chapter}.{number}": question
    for questions in _ALL
    for number, question in enumerate(questions, 1)
}
