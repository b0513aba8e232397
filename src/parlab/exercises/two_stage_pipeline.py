"""The exercise of chapter 6 on real processes: a pipeline of two stages, with send and recv."""

import numpy as np

from parlab.exercises.records import Case, Exercise, Misconception

ORDER_OF_SUMS = "the micro-batches' gradients are added in another order than in one batch"


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
    import torch  # given
    import torch.distributed as dist  # given

    rank, loss = dist.get_rank(), 0.0  # given
    W = weights[rank].clone().requires_grad_()  # given
    pairs = list(zip(x.chunk(micro_batches), target.chunk(micro_batches), strict=True))  # given
    held = []
    if rank == 0:
        for x_part, _ in pairs:
            hidden = torch.tanh(x_part @ W)
            dist.send(hidden.detach(), dst=1)
            held.append(hidden)
        for hidden in held:
            gradient = torch.empty_like(hidden)
            dist.recv(gradient, src=1)
            hidden.backward(gradient)
    else:
        for x_part, target_part in pairs:
            hidden = torch.empty(len(x_part), len(W), dtype=W.dtype)
            dist.recv(hidden, src=0)
            hidden.requires_grad_()
            part = ((hidden @ W - target_part) ** 2).mean() / micro_batches
            loss += part.item()
            held.append((hidden, part))
        for hidden, part in held:
            part.backward()
            dist.send(hidden.grad, dst=0)
    return W.grad, loss  # given


# The independent route: one process, no micro-batches, gradients in closed form.


def _both_stages(x, target, weights):
    """Gradient of the hidden layer and of W1, and the loss."""
    hidden = np.tanh(x @ weights[0])
    misses = hidden @ weights[1] - target
    back = 2 * misses / misses.size
    return (back @ weights[1].T) * (1 - hidden**2), hidden.T @ back, (misses**2).mean()


def _expect(x, target, weights, micro_batches):
    back, dW1, loss = _both_stages(x, target, weights)
    return [x.T @ back, dW1], [0.0, loss]


def _draw(rng):
    m = int(rng.integers(2, 5))
    features, hidden, outputs = (int(rng.integers(1, 4)) for _ in range(3))
    rows = m * int(rng.integers(1, 3))
    shapes = (rows, features), (rows, outputs), (features, hidden), (hidden, outputs)
    x, target, W0, W1 = (rng.integers(-8, 9, shape) / 4 for shape in shapes)
    return x, target, [W0, W1], m


# Known mistakes, from the gradients of each micro-batch.


def _of_parts(combine, of_loss=None):
    """A way: combine the micro-batches' gradients, each of its own mean loss; likewise losses."""

    def way(x, target, weights, micro_batches):
        parts = zip(np.split(x, micro_batches), np.split(target, micro_batches), strict=True)
        grads = [[], []]
        losses = []
        for x_part, target_part in parts:
            (dW0, dW1), (_, loss) = _expect(x_part, target_part, weights, 1)
            grads[0].append(dW0)
            grads[1].append(dW1)
            losses.append(loss)
        loss = (of_loss or np.mean)(np.array(losses))
        return [combine(np.stack(grad)) for grad in grads], [0.0, loss]

    return way


def _in_both(combine):
    """Gradients and loss combined like this, or gradients alone."""
    return _of_parts(combine), _of_parts(combine, combine)


def _rank_0(gradient):
    """A way in which stage 1 is right and rank 0's gradient is not."""

    def way(x, target, weights, micro_batches):
        (_, dW1), losses = _expect(x, target, weights, micro_batches)
        return [gradient(x, target, weights, micro_batches), dW1], losses

    return way


def _nothing(*args):
    return None


def _zeros(x, target, weights, micro_batches):
    return np.zeros_like(weights[0])


def _of_ones(x, target, weights, micro_batches):
    return x.T @ (1 - np.tanh(x @ weights[0]) ** 2)


def _backwards_in_another_order(x, target, weights, micro_batches):
    """Each micro-batch gets the gradient that belongs to its mirror image in the order."""
    hidden = np.tanh(x @ weights[0])
    back = 2 * (hidden @ weights[1] - target) / target.size @ weights[1].T
    mirrored = np.concatenate(np.split(back, micro_batches)[::-1])
    return x.T @ (mirrored * (1 - hidden**2))


ONE = np.ones((1, 1))

EXERCISES = (
    Exercise(
        chapter=6,
        solution=two_stage_pipeline,
        expect=_expect,
        route="one process and one batch, gradients in closed form",
        draw=_draw,
        cases=(
            Case(
                (0 * ONE, ONE, [ONE, ONE], 1),
                ([0 * ONE, 0 * ONE], [0.0, 1.0]),
                "nothing in, an error of 1, by hand",
            ),
        ),
        misconceptions=(
            Misconception(
                "no gradient comes back to the first stage",
                (
                    _rank_0(lambda *args: None),
                    _rank_0(lambda x, t, w, m: 0 * w[0]),
                    _rank_0(_of_ones),
                ),
                "Autograd's graph ends where a tensor leaves the process. The first stage learns "
                "nothing unless the second sends it the gradient of what it received.",
                "Which tensor's .grad does stage 1 have to send, and what does backward of stage "
                "0 start from?",
            ),
            Misconception(
                "micro-batches are summed, not averaged",
                _in_both(lambda parts: parts.sum(0)),
                "The loss is a mean over the batch. A sum of the micro-batches' means is m times "
                "as large, so the result depends on how the batch was cut.",
                "Run it with one micro-batch and with two: may the gradient differ?",
            ),
            Misconception(
                "divided by the micro-batches twice",
                _in_both(lambda parts: parts.mean(0) / len(parts)),
                "Either each micro-batch's loss is divided by m, or the sum of the gradients is.",
                "Run it with one micro-batch and with two: may the gradient differ?",
            ),
            Misconception(
                "only one micro-batch has a say",
                (
                    *_in_both(lambda parts: parts[-1]),
                    _of_parts(lambda parts: parts[-1] / len(parts)),
                ),
                "Gradients of all micro-batches add up in .grad until the step. Clearing it, or "
                "keeping one hidden layer only, drops the others.",
                "How many hidden layers does stage 0 hold when forward is over?",
            ),
            Misconception(
                "gradients come back in another order than they are taken",
                (_rank_0(_backwards_in_another_order),),
                "Messages between two ranks arrive in the order in which they were sent. If stage "
                "1 goes back from the last micro-batch, so must stage 0.",
                "Which micro-batch does each rank's first backward belong to?",
            ),
            Misconception(
                "the loss of one micro-batch",
                tuple(
                    _of_parts(lambda parts: parts.mean(0), of_loss)
                    for of_loss in (
                        lambda losses: losses[-1],
                        lambda losses: losses[-1] / len(losses),
                    )
                ),
                "What is reported is the last micro-batch's loss; the batch's is the mean of all.",
                "What happens to the loss of the first micro-batch?",
            ),
            Misconception(
                "the losses are summed, not averaged",
                (_of_parts(lambda parts: parts.mean(0), np.sum),),
                "The gradients are those of the mean, but the loss that is reported is m times "
                "as large.",
                "What should the loss be if all micro-batches are alike?",
            ),
        ),
        parts=("gradients", "losses"),
        tolerance=1e-9,
        why_tolerance=ORDER_OF_SUMS,
        n_random=3,
        n_ranks=2,
    ),
)
