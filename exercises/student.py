"""Your solutions: `pytest exercises` tests all of them, `pl.check(function)` one.

Those that begin with `import torch` run on several processes; `pytest exercises -m "not ranks"`
leaves them out.

Replace `raise NotImplementedError` in each function. What stands around it is given, and yours to
change. Numbers are bytes, seconds and bytes/s.
"""

import math

import numpy as np

from parlab import gelu

# Chapter 1


def ring_all_reduce(arrays):
    """All-reduce on a ring: every rank ends with the elementwise sum.

    arrays: one per rank, all of one shape and dtype; any number of elements. A rank sends to its
    right neighbour only, one chunk in each step. The arrays stay as they are.

    Returns (results, sent): each rank's sum, in the arrays' shape, and the bytes each rank sent.

    >>> results, sent = ring_all_reduce([np.array([1, 2]), np.array([10, 20])])
    >>> results[0].tolist(), results[1].tolist(), sent
    ([11, 22], [11, 22], [16, 16])
    """
    n = len(arrays)
    chunks = [np.array_split(np.array(array).ravel(), n) for array in arrays]
    sent = [0] * n
    # Your code here.
    raise NotImplementedError
    return [np.concatenate(row).reshape(arrays[0].shape) for row in chunks], sent


def ring_reduce_scatter(arrays):
    """Reduce-scatter on a ring: rank r ends with chunk r of the sum.

    arrays: one per rank, all of one size and dtype, cut as `np.array_split` cuts. A rank sends to
    its right neighbour only, one chunk in each step. The arrays stay as they are.

    Returns (results, sent): each rank's chunk, and the bytes each rank sent.

    >>> results, sent = ring_reduce_scatter([np.array([1, 2]), np.array([10, 20])])
    >>> results[0].tolist(), results[1].tolist(), sent
    ([11], [22], [8, 8])
    """
    n = len(arrays)
    chunks = [np.array_split(np.array(array).ravel(), n) for array in arrays]
    sent = [0] * n
    # Your code here.
    raise NotImplementedError


def ring_all_gather(shards):
    """All-gather on a ring: every rank ends with all shards, in the order of the ranks.

    shards: one flat array per rank; sizes may differ. A rank sends to its right neighbour only, one
    shard in each step: first its own, then what it has just received.

    Returns (results, sent): each rank's concatenation, and the bytes each rank sent.

    >>> results, sent = ring_all_gather([np.array([1, 2]), np.array([3])])
    >>> results[0].tolist(), results[1].tolist(), sent
    ([1, 2, 3], [1, 2, 3], [16, 8])
    """
    n = len(shards)
    sent = [0] * n
    # Your code here.
    raise NotImplementedError


def hierarchical_all_reduce(arrays, ranks_per_node):
    """All-reduce in three stages: inside the nodes, across them, inside the nodes.

    Reduce-scatter inside each node; then a ring all-reduce of each shard among the ranks that hold
    it, one in each node; then all-gather inside each node.

    arrays: one flat array per rank, of one dtype; the number of ranks divides their size.
    ranks_per_node: consecutive ranks that share a node.

    Returns (results, leaving): each rank's sum, and for each node the bytes that leave it.

    >>> results, leaving = hierarchical_all_reduce([np.ones(8)] * 4, ranks_per_node=2)
    >>> results[3].tolist() == [4.0] * 8, leaving
    (True, [64, 64])
    """
    n, local = len(arrays), ranks_per_node
    nodes = n // local
    # Your code here.
    raise NotImplementedError


def all_reduce_cost(n_ranks, tensor_bytes, latency_s, bandwidth_bytes_per_s):
    """Price a ring all-reduce: a message of b bytes takes latency + b / bandwidth.

    n_ranks: N. tensor_bytes: S, on each rank. latency_s: of one message. bandwidth_bytes_per_s: of
    a link in one direction, as a rank sends and receives at the same time.

    Returns (steps, bytes_per_rank, seconds): steps one after the other, bytes that a rank sends.

    >>> steps, sent, seconds = all_reduce_cost(8, 14e9, 0, 450e9)
    >>> steps, sent, round(seconds, 4)
    (14, 24500000000.0, 0.0544)
    """
    # Your code here.
    raise NotImplementedError


def tree_all_reduce_cost(n_ranks, tensor_bytes, latency_s, bandwidth_bytes_per_s):
    """Price a pipelined tree all-reduce: up to the root and down again.

    The tree has ceil(log2 N) levels. The tensor is cut into so many pieces that all levels work at
    the same time, so a rank inside the tree sends its S bytes up and S bytes down at full speed,
    and the levels cost latency only. One rank alone sends nothing.

    Arguments and results as in `all_reduce_cost`.

    >>> steps, sent, seconds = tree_all_reduce_cost(8, 1e6, 5e-6, 50e9)
    >>> steps, sent, round(seconds, 9)
    (6, 2000000.0, 7e-05)
    """
    # Your code here.
    raise NotImplementedError


def ring_tree_crossover_bytes(n_ranks, latency_s, bandwidth_bytes_per_s):
    """Return the size of the tensor from which on the ring beats the pipelined tree.

    Both as in `all_reduce_cost` and `tree_all_reduce_cost`. It is 0 where the tree never wins.

    >>> round(ring_tree_crossover_bytes(8, 5e-6, 50e9))
    8000000
    """
    # Your code here.
    raise NotImplementedError


def mean_over_ranks(arrays):
    """Return the exact elementwise mean of the ranks' integers, as float64.

    arrays: one per rank, all of one shape, of dtype int8 (-128 to 127).

    >>> mean_over_ranks([np.array([3, 100], np.int8), np.array([4, 120], np.int8)]).tolist()
    [3.5, 110.0]
    """
    # Your code here.
    raise NotImplementedError


def ring_by_messages(tensors):
    """All-reduce on a ring of processes, by `dist.isend` and `dist.irecv`; every rank calls this.

    tensors: one per rank, flat, of one size and dtype; the ranks need not divide the size. This
    rank's own is tensors[rank]; what the others have must come in messages. A rank sends to its
    right neighbour and receives from its left one, one chunk in each step. A message is under way
    until `.wait()` of both its ends has returned.

    Returns (result, sent): the elementwise sum, and the bytes that this rank sent.

    >>> import torch
    >>> from parlab import run_ranks
    >>> tensors = [torch.ones(3), 2 * torch.ones(3), 4 * torch.ones(3)]
    >>> run_ranks(ring_by_messages, 3, args=(tensors,))[0]  # 2 x 2 chunks of 4 bytes
    (tensor([7., 7., 7.]), 16)
    """
    import torch
    import torch.distributed as dist

    rank, n = dist.get_rank(), dist.get_world_size()
    chunks = list(tensors[rank].clone().tensor_split(n))
    sent = 0
    # Your code here.
    raise NotImplementedError
    return torch.cat(chunks), sent


# Chapter 2


def data_parallel_grad(X, y, w, n):
    """Gradient of a least-squares loss, averaged over n ranks with equal shards of the rows.

    The loss is half the mean of (Xw - y)^2, so a shard's gradient is X_k' (X_k w - y_k) / rows of
    the shard.

    X: (rows, features). y: (rows,). w: (features,). n divides the rows.

    >>> X, y, w = np.array([[1.0], [2.0]]), np.zeros(2), np.ones(1)
    >>> data_parallel_grad(X, y, w, 2).tolist()  # (1 + 4) / 2
    [2.5]
    """
    # Your code here.
    raise NotImplementedError


def unequal_shards_grad(X, y, w, n):
    """The full batch's gradient from n ranks whose shards differ in size.

    Each rank knows the gradient of its own mean loss, as in `data_parallel_grad`, and its number of
    rows. The rows are cut as `np.array_split` cuts them; n is at most their number.

    >>> X, y, w = np.array([[1.0], [2.0], [6.0]]), np.zeros(3), np.ones(1)
    >>> unequal_shards_grad(X, y, w, 2)  # (1 + 4 + 36) / 3
    array([13.66666667])
    """
    shards = list(zip(np.array_split(X, n), np.array_split(y, n), strict=True))
    # Your code here.
    raise NotImplementedError


def average_gradients(grads):
    """Return the mean over ranks of their gradients, as floats.

    grads: one array per rank, all of one shape, of floats or of integers.

    >>> average_gradients([np.array([3, 10]), np.array([4, 20])]).tolist()
    [3.5, 15.0]
    """
    # Your code here.
    raise NotImplementedError


def token_weighted_mean(losses, tokens):
    """Return the mean loss per token, over all ranks and micro-batches.

    losses: for each rank a list with the mean loss of each of its micro-batches.
    tokens: for each rank a list with the number of tokens behind each of these means.

    >>> token_weighted_mean([[1.0], [4.0]], [[2], [8]])
    3.4
    """
    # Your code here.
    raise NotImplementedError


def ddp_by_hand(X, y, starts, lr, steps):
    """Train a linear model on several processes that stay equal; every rank calls this.

    The prediction is X w + b, the loss the mean of its squared errors, the optimizer plain gradient
    descent: parameter -= lr * gradient. All ranks begin with the parameters of rank 0, as under
    DDP, and each computes gradients of its own rows only.

    X: (rows, features). y: (rows,). The ranks divide the rows. starts: one pair (w, b) per rank, w
    of shape (features,), b of shape (1,). lr: learning rate.

    Returns (w, b) after the steps, which are those of one process with all rows.

    >>> import torch
    >>> from parlab import run_ranks
    >>> X, y, start = torch.tensor([[1.0], [3.0]]), torch.zeros(2), (torch.ones(1), torch.zeros(1))
    >>> run_ranks(ddp_by_hand, 2, args=(X, y, [start, start], 0.1, 1))  # 1 - 0.1 (2 + 18) / 2
    [(tensor([0.]), tensor([-0.4000])), (tensor([0.]), tensor([-0.4000]))]
    """
    import torch.distributed as dist

    rank, n = dist.get_rank(), dist.get_world_size()
    w, b = (start.clone().requires_grad_() for start in starts[rank])
    X, y = X.tensor_split(n)[rank], y.tensor_split(n)[rank]
    # Your code here.
    raise NotImplementedError
    return w.detach(), b.detach()


# Chapter 3


def column_parallel(x, w_shards):
    """Return x @ [W_1 | W_2 | ...], where each rank computes its own block of columns.

    x: (rows, in), whole on every rank. w_shards: rank i's W_i, (in, out_i).

    >>> x, w = np.array([[10.0]]), np.array([[1.0, 2.0, 3.0, 4.0]])
    >>> column_parallel(x, np.split(w, 2, axis=1)).tolist()
    [[10.0, 20.0, 30.0, 40.0]]
    """
    # Your code here.
    raise NotImplementedError


def row_parallel(x_shards, w_shards, bias=None):
    """Return [x_1 | x_2 | ...] @ [W_1 ; W_2 ; ...] + bias, from each rank's block of rows.

    x_shards: rank i's columns of x, (rows, in_i). w_shards: rank i's W_i, (in_i, out).
    bias: (out,), or None.

    >>> x, w = np.array([[1, 2, 3, 4]]), np.arange(12).reshape(4, 3)
    >>> bias = np.array([100, 200, 300])
    >>> row_parallel(np.split(x, 2, axis=1), np.split(w, 2), bias).tolist()
    [[160, 270, 380]]
    """
    # Your code here.
    raise NotImplementedError


def megatron_mlp(x, A, B, n):
    """Return gelu(x A) B from n ranks, with one sum over the ranks, at the end.

    x: (rows, h), whole on every rank. A: (h, f). B: (f, h). n divides f.

    >>> x, A, B = np.ones((1, 2)), np.ones((2, 4)), np.ones((4, 2))
    >>> bool(np.allclose(megatron_mlp(x, A, B, 4), gelu(x @ A) @ B))
    True
    """
    # Your code here.
    raise NotImplementedError


def columns_only_mlp(x, A, B, n):
    """Return (gelu(x A) B, sent) with *both* matrices cut by columns over n ranks.

    After each matrix product a ring all-gather gives every rank the whole result.

    x: (rows, h), whole on every rank. A: (h, f). B: (f, h). n divides f and h.
    sent: bytes that each rank sends in the two all-gathers, one number as all ranks send as many.

    >>> x, A, B = np.ones((1, 2)), np.ones((2, 4)), np.ones((4, 2))
    >>> output, sent = columns_only_mlp(x, A, B, 2)
    >>> bool(np.allclose(output, gelu(x @ A) @ B)), sent  # half of 4 + 2 doubles
    (True, 24)
    """
    sent = 0
    # Your code here.
    raise NotImplementedError
    return output, sent


def packed_swiglu_mlp(x, gate_up, down, n):
    """Return (silu(x G) * (x U)) D from n ranks, where gate_up is packed as [G | U].

    silu(z) = z / (1 + exp(-z)), entry by entry. Each rank gets the same block of columns of G and
    of U, and these rows of D; one sum over the ranks at the end.

    x: (rows, h). gate_up: (h, 2f). down: (f, h). n divides f.

    >>> packed, down = np.array([[1.0, 2.0, 3.0, 4.0]]), np.ones((2, 1))
    >>> packed_swiglu_mlp(np.ones((1, 1)), packed, down, 2).round(5).tolist()
    [[9.23955]]
    """
    # Your code here.
    raise NotImplementedError


def vocabulary_parallel_cross_entropy(logit_shards, target):
    """Return -log softmax(logits)[target] of one token, its logits cut over the ranks.

    loss = log(sum of exp(l - M)) + M - l[target], with M the largest logit of all: without it exp
    overflows. Ranks exchange single numbers, never their logits.

    logit_shards: rank i's logits, (v_i,), in rank order. target: its place in the whole vocabulary.

    >>> shards = [np.array([1000.0, 0.0]), np.array([-1000.0, 999.0])]
    >>> round(vocabulary_parallel_cross_entropy(shards, 1), 4)
    1000.3133
    """
    # Your code here.
    raise NotImplementedError


def heads_on_rank(rank, n, n_heads, n_kv_heads):
    """Return the query heads and the key-value heads that a rank of n holds, as two lists.

    Consecutive query heads go to one rank, n_heads / n to each. Query head q needs key-value head
    q // (n_heads / n_kv_heads). A rank holds those that its query heads need, whole: a head is
    never cut, but several ranks may hold the same one.

    n divides n_heads; n divides n_kv_heads, or n_kv_heads divides n.

    >>> heads_on_rank(5, 8, 32, 4)
    ([20, 21, 22, 23], [2])
    """
    # Your code here.
    raise NotImplementedError


def mlp_with_f_and_g(x, A, B, dz):
    """Forward and backward of GeLU(x A) B, cut over several processes; every rank calls this.

    A rank has some columns of A and the matching rows of B. Write f and g as subclasses of
    torch.autograd.Function, each with static methods forward(ctx, tensor) and backward(ctx,
    gradient). f stands where x enters the block, whole on every rank; g where the ranks' partial
    results leave it as one. What each has to do on the way back follows from that.

    x: (rows, h). A: (h, f). B: (f, h). dz: (rows, h), gradient of the loss with respect to the
    result. All are the same on every rank, which take their shares themselves.

    Returns (z, dx, dA, dB): result, and gradients as without ranks: of x whole, of A and B the
    rank's share.

    >>> import torch
    >>> from parlab import run_ranks
    >>> args = torch.zeros(1, 2), torch.ones(2, 4), torch.ones(4, 2), torch.ones(1, 2)
    >>> z, dx, dA, dB = run_ranks(mlp_with_f_and_g, 2, args=args)[0]
    >>> z, dx  # GeLU's slope at 0 is 1/2: 4 columns, each with 1/2 of 1 + 1
    (tensor([[0., 0.]]), tensor([[4., 4.]]))
    >>> dA.shape, dB.shape
    (torch.Size([2, 2]), torch.Size([2, 2]))
    """
    import torch
    import torch.distributed as dist

    # Your code here.
    raise NotImplementedError
    rank, n = dist.get_rank(), dist.get_world_size()
    shares = x, A.tensor_split(n, dim=1)[rank], B.tensor_split(n)[rank]
    x, A, B = (share.clone().requires_grad_() for share in shares)
    z = g.apply(torch.nn.functional.gelu(f.apply(x) @ A) @ B)
    z.backward(dz)
    return z.detach(), x.grad, A.grad, B.grad


# Chapter 4


def zero_memory_bytes(n_params, n_gpus, stage, k=12):
    """Return the bytes of the model states on one GPU.

    2 bytes a parameter of weights, 2 of gradients and k of optimizer. Stage 1 cuts the optimizer
    over the GPUs, stage 2 the gradients too, stage 3 the weights too.

    >>> [zero_memory_bytes(7e9, 8, stage) / 1e9 for stage in range(4)]
    [112.0, 38.5, 26.25, 14.0]
    """
    # Your code here.
    raise NotImplementedError


def zero_memory(n_params, n_gpus, stage, weight_bytes=2, grad_bytes=2, k=12):
    """Return (weights, gradients, optimizer): bytes of each on one GPU.

    weight_bytes, grad_bytes, k: bytes a parameter of each. Stages as in `zero_memory_bytes`.

    >>> zero_memory(7e9, 8, 2, grad_bytes=4)
    (14000000000.0, 3500000000.0, 10500000000.0)
    """
    # Your code here.
    raise NotImplementedError


def zero_traffic_bytes(n_params, n_gpus, stage, micro_batches=1):
    """Return the bytes that one GPU sends in a step, weights and gradients in 2 bytes each.

    A step accumulates the gradients of several micro-batches. On a ring of N, a reduce-scatter or
    an all-gather of S bytes sends (N-1)/N S; an all-reduce is one of each.

    stage 0: one all-reduce of the gradients. 1: one reduce-scatter of the gradients, one all-gather
    of the new weights. 2: a reduce-scatter of the gradients for each micro-batch, one all-gather.
    3: for each micro-batch, all-gather of the weights in forward and again in backward, and
    reduce-scatter of the gradients.

    >>> [zero_traffic_bytes(7e9, 8, stage, 4) / 1e9 for stage in range(4)]
    [24.5, 24.5, 61.25, 147.0]
    """
    # Your code here.
    raise NotImplementedError


def gpt_params(layers, hidden, vocab, positions, tied):
    """Return the number of parameters of a GPT-2.

    Embeddings of `vocab` tokens and of `positions`. In each layer query, key, value and output
    matrices of h x h and an MLP from h to 4h and back, all with biases, and two norms with weight
    and bias. After the last layer one more norm, and a head from h to vocab without a bias, which,
    if `tied`, is the token embedding's matrix.

    >>> gpt_params(12, 768, 50257, 1024, tied=True)
    124439808
    """
    # Your code here.
    raise NotImplementedError


def moe_zero1_bytes(shared_params, expert_params, experts, per_token, n_gpus, ep):
    """Return the bytes of model states on one GPU of a model with experts, under ZeRO 1.

    2 bytes a parameter of weights, 2 of gradients and 12 of optimizer, which ZeRO cuts over the
    GPUs that hold the same parameters. Expert parallelism gives each GPU experts / ep of the
    experts; all of them hold the shared parameters.

    expert_params: of one expert, in all layers together. per_token: how many experts a token
    visits. ep divides the experts and n_gpus.

    >>> moe_zero1_bytes(1605636096, 5637144576, 8, 2, 64, 8) / 1e9  # Mixtral 8x7B
    37.72789632
    """
    # Your code here.
    raise NotImplementedError


def sharded_optimizer_step(weights, gradients, momenta, lr):
    """One step of an optimizer of which each rank holds a slice: ZeRO's stage 1.

    Reduce-scatter the gradients, so that each rank has the ranks' mean of its slice; update the
    slice, momentum = 0.9 momentum + gradient and weights -= lr * momentum; all-gather the weights.

    weights: (k,), the same on all ranks. gradients: one of shape (k,) per rank; a rank may use its
    own only. momenta: one slice per rank, of ceil(k / n) elements: where the n ranks do not divide
    k, weights and gradients are thought filled up with zeros. lr: learning rate.

    Returns (weights, momentum): all k new weights, and this rank's new slice of the momentum.

    >>> import torch
    >>> from parlab import run_ranks
    >>> gradients, momenta = [torch.ones(3), 3 * torch.ones(3)], [torch.zeros(2)] * 2
    >>> run_ranks(sharded_optimizer_step, 2, args=(torch.ones(3), gradients, momenta, 0.5))[1]
    (tensor([0., 0., 0.]), tensor([2., 0.]))
    """
    import torch
    import torch.distributed as dist

    rank, n = dist.get_rank(), dist.get_world_size()
    gradient, momentum = gradients[rank], momenta[rank]
    # Your code here.
    raise NotImplementedError


def fsdp_by_hand(inputs, targets, shards):
    """Gradients of a model whose weights are sharded over the ranks, as FSDP trains it.

    Layer l computes h_l = tanh(h_(l-1) W_l) from h_0, this rank's rows. The loss of a rank is half
    the mean over its rows of the squared errors, added up over the columns: its gradient with
    respect to the last h is (h - target) / rows. With d the gradient with respect to h_l and
    c = d (1 - h_l^2), that of W_l is h_(l-1)' c, and that of h_(l-1) is c W_l'.

    A rank may hold the whole of one layer's weights only, and of one layer's gradient: all-gather,
    compute, free, in forward and again in backward (the first layer too, as in FSDP), then
    reduce-scatter.

    inputs, targets: one per rank, (rows, h), with as many rows each. shards: one list per rank,
    its block of h / n rows of every layer's (h, h) weights. A rank may use its own only.

    Returns (gradients, sent): of this rank's shards, the mean over the ranks; and the bytes that it
    sends on a ring, where an all-gather or a reduce-scatter of S bytes sends (n-1)/n S.

    >>> import torch
    >>> from parlab import run_ranks
    >>> rows, shards = [torch.ones(1, 2)] * 2, [[torch.zeros(1, 2)]] * 2
    >>> run_ranks(fsdp_by_hand, 2, args=(rows, rows, shards))[0]
    ([tensor([[-1., -1.]])], {'all_gather': 16, 'reduce_scatter': 8})
    """
    import torch
    import torch.distributed as dist

    rank, n = dist.get_rank(), dist.get_world_size()
    sent = {"all_gather": 0, "reduce_scatter": 0}

    # Your code here.
    raise NotImplementedError
    return gradients, sent


def dim0_shards(rows, n_gpus):
    """Return the rows of a weight that each GPU holds, as PyTorch's fully_shard cuts it.

    Every GPU takes ceil(rows / N) rows until none are left, so the last ones may get fewer or none.

    >>> dim0_shards(10, 8)
    [2, 2, 2, 2, 2, 0, 0, 0]
    """
    # Your code here.
    raise NotImplementedError


# Chapter 5


def activation_memory_bytes(
    layers,
    hidden,
    heads,
    sequence,
    micro_batch,
    tp=1,
    sequence_parallel=False,
    recompute="none",
):
    """Return the bytes of activations that a transformer's layers keep for backward.

    Per layer, in 16 bits with dropout, s the sequence, b the micro-batch, h hidden, a heads, t tp:

        10 sbh         whole on every rank, or 10 sbh / t with sequence_parallel
        24 sbh / t     inside attention and MLP
        5 a s^2 b / t  attention's scores; recompute="selective" does not keep them

    recompute="full" keeps only each layer's input, 2 sbh.

    >>> activation_memory_bytes(48, 6144, 64, 2048, 4, tp=8) / 2**30
    59.25
    """
    # Your code here.
    raise NotImplementedError


def nodes_needed(n_params, activation_bytes, card_bytes=80e9, gpus_per_node=8):
    """Return the smallest number of nodes on which a model trains under ZeRO stage 3.

    Each card holds its share of 16 bytes a parameter, and its own activation_bytes, which do not
    shrink with the number of cards. Return None where the activations alone fill a card.

    >>> nodes_needed(70e9, 5.4e9)  # 1,120 GB of states, 74.6 GB left on a card: 16 cards
    2
    """
    # Your code here.
    raise NotImplementedError


# Chapter 6


def split_layers(layers, stages):
    """Return how many layers each pipeline stage has: as even as can be, the larger ones first.

    >>> split_layers(30, 4)
    [8, 8, 7, 7]
    """
    # Your code here.
    raise NotImplementedError


def pipeline_bubble(stages, micro_batches):
    """Return the idle fraction of GPipe or 1F1B: idle time over *total* time of all stages.

    Every stage takes the same time for each micro-batch.

    >>> pipeline_bubble(4, 29) == 3 / 32
    True
    """
    # Your code here.
    raise NotImplementedError


def bubble_of_ideal(stages, micro_batches):
    """Return the same bubble in the other convention: idle time over *ideal* time.

    The ideal time is that of the work alone, without any waiting.

    >>> bubble_of_ideal(8, 64)
    0.109375
    """
    # Your code here.
    raise NotImplementedError


def interleaved_bubble_fraction(stages, micro_batches, chunks):
    """Return the idle fraction of interleaved 1F1B: idle time over *total* time of all stages.

    The model is cut into stages x chunks equal parts, and each rank has `chunks` of them, so that
    one part takes 1/chunks of the time. stages divides micro_batches.

    >>> interleaved_bubble_fraction(4, 8, 2) == 3 / 19
    True
    """
    # Your code here.
    raise NotImplementedError


def one_f_one_b(stages, micro_batches):
    """Return the order of 1F1B, and how many micro-batches each stage holds at most.

    Stage s of p starts with p - 1 - s forward passes, or with all there are if they are fewer. Then
    it alternates one forward and one backward, and ends with the backwards that are left. A
    micro-batch is held from its forward to the end of its backward.

    Returns (orders, peaks): for each stage a list of names, numbered from 1, and a number.

    >>> orders, peaks = one_f_one_b(2, 3)
    >>> orders[0]
    ['F1', 'F2', 'B1', 'F3', 'B2', 'B3']
    >>> orders[1], peaks
    (['F1', 'B1', 'F2', 'B2', 'F3', 'B3'], [2, 1])
    """
    p, m = stages, micro_batches
    orders, peaks = [], []
    # Your code here.
    raise NotImplementedError
    return orders, peaks


def gpipe_grid(stages, micro_batches):
    """Simulate GPipe: what each stage does in each time slot.

    All forwards, then all backwards, the last micro-batch first; each takes one slot. A forward
    needs the one of the stage before it, a backward that of the stage after it.

    Returns (grid, idle, peak): grid[stage][slot] is "F1", "B1" and so on, numbered from 1, or ".";
    the number of idle slots of all stages; and how many micro-batches a stage holds at most, from
    forward to backward.

    >>> grid, idle, peak = gpipe_grid(2, 2)
    >>> for row in grid:
    ...     print(*row, sep="  ")
    F1  F2  .  .  B2  B1
    .  F1  F2  B2  B1  .
    >>> idle, peak
    (4, 2)
    """
    p, m = stages, micro_batches
    grid = [["."] * (2 * (m + p - 1)) for _ in range(p)]
    # Your code here.
    raise NotImplementedError


def map_3d_job(tp, dp, pp, gpus_per_node=8):
    """Map a job with three axes onto a cluster: its groups, and the nodes that they span.

    Ranks count along the tensor-parallel axis first, then data-parallel, then pipeline, and fill
    one node after the other. The ranks of a group differ in one axis only.

    Returns (groups, nodes): two dicts with the keys "tp", "dp" and "pp". groups[axis] lists all
    groups along that axis, each a list of ranks; both in ascending order. nodes[axis] is the
    largest number of nodes that one of these groups touches.

    >>> groups, nodes = map_3d_job(tp=2, dp=2, pp=2, gpus_per_node=2)
    >>> groups["tp"], groups["dp"]
    ([[0, 1], [2, 3], [4, 5], [6, 7]], [[0, 2], [1, 3], [4, 6], [5, 7]])
    >>> groups["pp"], nodes
    ([[0, 4], [1, 5], [2, 6], [3, 7]], {'tp': 1, 'dp': 2, 'pp': 2})
    """
    strides = {"tp": 1, "dp": tp, "pp": tp * dp}
    # Your code here.
    raise NotImplementedError


def two_stage_pipeline(x, target, weights, micro_batches):
    """Gradients of a model cut into two stages, one on each of two processes, which both call this.

    Stage 0 computes hidden = tanh(x W0), stage 1 the output hidden W1. The loss is the mean of the
    squared errors of all outputs. As in GPipe, forward of all micro-batches comes before the first
    backward: `dist.send` may wait until the other side receives, so a rank that sends gradients
    while the other still sends hidden layers waits forever.

    x: (rows, features). target: (rows, outputs). weights: [W0, W1], of which a rank uses its own.
    micro_batches: divides the rows, which are cut into as many equal parts, in order.

    Returns (gradient, loss): of this rank's matrix, as from the whole batch in one process; and the
    loss on rank 1, 0.0 on rank 0.

    >>> import torch
    >>> from parlab import run_ranks
    >>> one = torch.ones(1, 1)
    >>> gradient, loss = run_ranks(two_stage_pipeline, 2, args=(one, 0 * one, [one, one], 1))[1]
    >>> round(gradient.item(), 3), round(loss, 3)  # 2 tanh(1)^2, tanh(1)^2
    (1.16, 0.58)
    """
    import torch
    import torch.distributed as dist

    rank, loss = dist.get_rank(), 0.0
    W = weights[rank].clone().requires_grad_()
    pairs = list(zip(x.chunk(micro_batches), target.chunk(micro_batches), strict=True))
    # Your code here.
    raise NotImplementedError
    return W.grad, loss
