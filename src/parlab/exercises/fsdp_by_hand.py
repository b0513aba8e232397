"""The exercise of chapter 4 on real processes: what FSDP does with a layer, by hand."""

import numpy as np

from parlab.exercises.data_parallel import ORDER_OF_SUMS, SUMMED
from parlab.exercises.records import Case, Exercise, Misconception
from parlab.exercises.sharded_optimizer import HINT_OF_AVG

N_RANKS = 2


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
    import torch  # given
    import torch.distributed as dist  # given

    rank, n = dist.get_rank(), dist.get_world_size()  # given
    sent = {"all_gather": 0, "reduce_scatter": 0}  # given

    def gathered(shard):
        parts = [torch.empty_like(shard) for _ in range(n)]
        dist.all_gather(parts, shard)
        sent["all_gather"] += (n - 1) * shard.nbytes
        return torch.cat(parts)

    hidden, gradients = [inputs[rank]], []
    for shard in shards[rank]:
        hidden.append(torch.tanh(hidden[-1] @ gathered(shard)))
    back = (hidden[-1] - targets[rank]) / len(targets[rank])
    for layer in reversed(range(len(shards[rank]))):
        shard, output = shards[rank][layer], hidden.pop()
        back = back * (1 - output**2)
        gradient = torch.empty_like(shard)
        dist.reduce_scatter(gradient, list((hidden[-1].T @ back).chunk(n)))
        sent["reduce_scatter"] += (n - 1) * gradient.nbytes
        gradients.insert(0, gradient / n)
        back = back @ gathered(shard).T
    return gradients, sent  # given


# The independent route: one process, all rows, whole weights.


def _whole_gradients(x, target, weights):
    """Of half the mean over rows of the squared errors."""
    if not weights:
        return [], (x - target) / len(x)
    output = np.tanh(x @ weights[0])
    later, back = _whole_gradients(output, target, weights[1:])
    back = back * (1 - output**2)
    return [x.T @ back, *later], back @ weights[0].T


def _weights(shards):
    return [np.concatenate(blocks) for blocks in zip(*shards, strict=True)]


def _sent(shards, gathers=2, scatters=1):
    others = sum(shard.nbytes for shard in shards[0]) * (N_RANKS - 1)
    return [{"all_gather": gathers * others, "reduce_scatter": scatters * others}] * N_RANKS


def _scattered(gradients):
    """Each rank's block of every layer."""
    return [[np.split(layer, N_RANKS)[rank] for layer in gradients] for rank in range(N_RANKS)]


def _expect(inputs, targets, shards):
    rows = np.concatenate(inputs), np.concatenate(targets)
    return _scattered(_whole_gradients(*rows, _weights(shards))[0]), _sent(shards)


def _draw(rng):
    rows, layers, h = int(rng.integers(1, 4)), int(rng.integers(2, 4)), 2 * int(rng.integers(1, 3))

    def quarters(*shape):
        return [rng.integers(-4, 5, shape) / 4 for _ in range(N_RANKS)]

    of_layers = [quarters(h // N_RANKS, h) for _ in range(layers)]
    shards = [list(blocks) for blocks in zip(*of_layers, strict=True)]
    return quarters(rows, h), quarters(rows, h), shards


# Known mistakes.


def _own_gradients(inputs, targets, shards):
    """[rank][layer]: whole gradients before any reduction."""
    weights = _weights(shards)
    return [_whole_gradients(x, t, weights)[0] for x, t in zip(inputs, targets, strict=True)]


def _combined(combine):
    """A way whose ranks scatter combine(all ranks' gradients of a layer, rank)."""

    def way(inputs, targets, shards):
        own = list(zip(*_own_gradients(inputs, targets, shards), strict=True))
        each = [
            _scattered([combine(np.stack(layer), rank) for layer in own])[rank]
            for rank in range(N_RANKS)
        ]
        return each, _sent(shards)

    return way


def _whole_kept(inputs, targets, shards):
    own = zip(*_own_gradients(inputs, targets, shards), strict=True)
    return [[np.mean(layer, axis=0) for layer in own]] * N_RANKS, _sent(shards)


def _last_layer_first(inputs, targets, shards):
    gradients, sent = _expect(inputs, targets, shards)
    return [layers[::-1] for layers in gradients], sent


def _bytes(count):
    """A way with right gradients; count(bytes of a rank's shards) gives what it counts."""

    def way(inputs, targets, shards):
        gradients, (right, *_) = _expect(inputs, targets, shards)
        return gradients, [count(right)] * N_RANKS

    return way


ONE_LAYER = [np.array([[1.0, 1.0]])] * 2, [np.array([[2.0, 0.0]]), np.array([[0.0, 4.0]])]
BY_HAND = [[np.array([[-1.0, -2.0]])]] * 2  # the means of (-2, 0) and (0, -4), in both rows

EXERCISES = (
    Exercise(
        chapter=4,
        solution=fsdp_by_hand,
        expect=_expect,
        route="one process with all rows and whole weights",
        draw=_draw,
        cases=(
            Case(
                (*ONE_LAYER, [[np.zeros((1, 2))]] * 2),
                (BY_HAND, [{"all_gather": 32, "reduce_scatter": 16}] * 2),
                "weights of 0 let the targets through, by hand",
            ),
        ),
        misconceptions=(
            SUMMED._replace(ways=(_combined(lambda g, rank: g.sum(0)),), hint=HINT_OF_AVG),
            Misconception(
                "divided twice",
                (_combined(lambda g, rank: g.mean(0) / len(g)),),
                "A reduce-scatter with AVG, or a loss over the rows of all ranks, has divided by "
                "the number of ranks already.",
                "Which operation does your reduce-scatter use?",
            ),
            Misconception(
                "each rank's shard comes from its own rows alone",
                (
                    _combined(lambda g, rank: g[rank]),
                    _combined(lambda g, rank: g[rank] / len(g)),
                ),
                "Only the weights are sharded: the other ranks' rows say something about this "
                "shard too. That is the reduce in reduce-scatter.",
                "Which part of your gradient does another rank need?",
            ),
            Misconception(
                "the whole gradient is kept",
                (_whole_kept,),
                "After an all-reduce every rank holds the mean of the whole gradient, N times what "
                "its optimizer uses.",
                "Which rows of the gradient belong to this rank's shard?",
            ),
            Misconception(
                "gradients stand in the order of backward",
                (_last_layer_first,),
                "Backward reaches the last layer first, the optimizer expects the shards' order. "
                "Where layers have one shape, nothing else tells.",
                "At which end of the list does the next gradient belong?",
            ),
            Misconception(
                "whole weights are kept from forward to backward",
                (_bytes(lambda sent: sent | {"all_gather": sent["all_gather"] / 2}),),
                "Then all layers lie there whole when backward begins, and that is the memory that "
                "full sharding saves. It costs a second all-gather: 1.5 times data parallelism.",
                "What must have become of a layer's weights when the next layer is gathered?",
            ),
            Misconception(
                "the gradients' bytes are those of an all-reduce",
                (_bytes(lambda sent: sent | {"reduce_scatter": 2 * sent["reduce_scatter"]}),),
                "A reduce-scatter is its first half: no rank needs the other shards' gradients.",
                "How many steps has a ring reduce-scatter, and how large is one message?",
            ),
            Misconception(
                "bytes that are kept or received count as sent",
                (_bytes(lambda sent: {op: 2 * size for op, size in sent.items()}),),
                "Of S bytes a rank keeps its own 1/N, and what it receives another has sent: (N-1) "
                "shards leave it.",
                "With two ranks, how much of the layer does this one lack?",
            ),
            Misconception(
                "elements are counted, not bytes",
                (_bytes(lambda sent: {op: size / 8 for op, size in sent.items()}),),
                "An element of float64 has 8 bytes.",
                "A tensor knows its bytes: .nbytes.",
            ),
        ),
        parts=("gradients", "sent"),
        tolerance=1e-9,
        why_tolerance=ORDER_OF_SUMS,
        n_random=3,
        n_ranks=N_RANKS,
    ),
)
