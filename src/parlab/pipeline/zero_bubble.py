"""Zero-bubble schedules: backward is cut in two, and its second half fills the gaps.

I, the gradient of the input, is what the rank before waits for. W, the gradient of the weights, can
wait. Qi et al. (arXiv 2401.10241, 2405.15362) call them B and W; their bubble is idle time between
a rank's own first and last action, by which two of these schedules reach zero. The pipeline still
fills and drains: over the makespan every rank idles at least (p - 1) F.
"""

from parlab.pipeline.schedules import Schedule, in_turn, loop, passes, require_sizes


def zero_bubble_h1(p, m):
    """ZB-H1: 1F1B with rank r running its W r micro-batches behind I.

    Qi et al. (arXiv 2401.10241), section 2.1, figure 2. With m >= p every rank holds p
    micro-batches, as rank 0 of 1F1B does; W still needs what F kept. With F = I = W = 1 it ends
    at 3 m + p - 1.

    >>> from parlab.pipeline.actions import short_name
    >>> for row in zero_bubble_h1(2, 3).actions:
    ...     print(*map(short_name, row))
    F1 F2 I1 W1 F3 I2 W2 I3 W3
    F1 I1 F2 I2 W1 F3 I3 W2 W3
    """
    p, m, _ = require_sizes(p, m, kinds=3)
    return _split_1f1b("ZB-H1", p, m, step=1)


def zero_bubble_h2(p, m):
    """ZB-H2: rank r runs 2 (p - 1 - r) F ahead of I, and its W 2 r micro-batches behind.

    Qi et al. (arXiv 2401.10241), section 2.2, figure 3. With m >= 2 p - 1 every rank holds 2 p - 1
    micro-batches, and with F = I = W none idles between its first and last action.

    >>> from parlab.pipeline.actions import short_name
    >>> for row in zero_bubble_h2(2, 3).actions:
    ...     print(*map(short_name, row))
    F1 F2 F3 I1 W1 I2 W2 I3 W3
    F1 I1 F2 I2 F3 I3 W1 W2 W3
    """
    p, m, _ = require_sizes(p, m, kinds=3)
    return _split_1f1b("ZB-H2", p, m, step=2)


def zero_bubble_v(p, m):
    """ZB-V: two chunks a rank in a V, so rank 0 holds the first stage and the last.

    Qi et al. (arXiv 2405.15362), section 4, figure 3: the first backward pass starts on the rank
    where the first forward pass did. With m >= 2 p - 1 and F = I = W no rank idles between its
    first and last action, and each holds at most 2 p chunks: as much as p micro-batches.

    >>> zero_bubble_v(4, 8).stages
    ((0, 7), (1, 6), (2, 5), (3, 4))
    >>> from parlab.pipeline.actions import short_name
    >>> print(*(short_name(action, 2) for action in zero_bubble_v(2, 3).actions[1]))
    F1.1 F1.2 F2.1 F2.2 I1.2 W1.2 F3.1 I1.1 W1.1 F3.2 I2.2 W2.2 I2.1 I3.2 I3.1 W2.1 W3.2 W3.1
    """
    p, m, _ = require_sizes(p, m, 2, kinds=3)
    down, up = ([passes(kind, m, chunk) for kind in "FIW"] for chunk in (0, 1))
    rows = tuple(tuple(_v_row(rank, p, max(m, 2 * p - 1), *down, *up)) for rank in range(p))
    stages = tuple((rank, 2 * p - 1 - rank) for rank in range(p))
    return Schedule("ZB-V", m, stages, rows, generated=True)


def _split_1f1b(name, p, m, step):
    forward, inputs, weights = (passes(kind, m) for kind in "FIW")
    rows = []
    for rank in range(p):
        ahead, behind = step * (p - 1 - rank), min(step * rank, m)
        later = [None] * behind + weights
        rows.append((*forward[:ahead], *in_turn(forward[ahead:], inputs, later)))
    return Schedule(name, m, loop(p), tuple(rows), generated=True)


def _v_row(r, p, n, f0, i0, w0, f1, i1, w1):
    """The order for n >= 2 p - 1 micro-batches; where there are fewer, the slices end sooner."""
    lead = 2 * (p - r) - 1
    yield from f0[:lead]
    yield from in_turn(f1[:r], f0[lead : lead + r])
    yield from in_turn(f1[r:p], i1[: p - r], w1[: p - r])
    steady = (
        f0[lead + r : n],
        i0[: n - p],
        w0[: n - p],
        f1[p:n],
        i1[p - r : n - r],
        w1[p - r : n - r],
    )
    yield from in_turn(*steady)
    yield from in_turn(i0[n - p : n - p + r], i1[n - r : n])
    yield from in_turn(i0[n - p + r : n], w0[n - p : n - r])
    yield from (*w1[n - r : n], *w0[n - r : n])
