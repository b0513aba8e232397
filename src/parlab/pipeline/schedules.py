"""Pipeline schedules as plain data: for each rank the list of its actions, in order.

A schedule has no times. The same object is timed by `timeline.simulate`, drawn by the panel and run
between processes by `parlab.distributed.pipeline`. p is the number of ranks, m of micro-batches and
v of chunks (stages) on a rank; ranks, stages, micro-batches and chunks count from 0.
"""

from dataclasses import InitVar, dataclass
from functools import cached_property
from itertools import zip_longest

from parlab.pipeline.actions import Action
from parlab.pipeline.check import check_actions, check_stages
from parlab.units import require_int

MAX_ACTIONS = 2_500_000  # some seconds and 300 MB once simulated


@dataclass(frozen=True, eq=False)
class Schedule:
    """What each rank runs, in order, and which stages of the model it holds.

    m: micro-batches. stages[rank][chunk]: a stage, from 0 to p v - 1; a chunk alone can't tell a
        loop (0 1 2 3, then 4 5 6 7) from a V (0 1 2 3, then back: 4 5 6 7 on ranks 3 2 1 0).
    actions: for each rank its Actions, or what `schedule_by_hand` accepts.
    generated: skips the check of lists that are complete by construction.

    Raises ValueError for a stage without a place, and for an action that is missing, repeated or
    out of range. `simulate` finds orders that block each other.
    """

    name: str
    m: int
    stages: tuple[tuple[int, ...], ...]
    actions: tuple[tuple[Action, ...], ...]
    generated: InitVar[bool] = False

    def __post_init__(self, generated):
        if generated:
            return
        require_int("m", self.m, minimum=1)
        object.__setattr__(self, "stages", check_stages(self.stages))
        if len(self.actions) != self.p:
            raise ValueError(
                f"actions must have a list for each of {self.p} ranks, got {len(self.actions)}"
            )
        object.__setattr__(self, "actions", check_actions(self.actions, self.m, self.v))

    @property
    def p(self):
        """Ranks."""
        return len(self.stages)

    @property
    def v(self):
        """Chunks (stages) on each rank."""
        return len(self.stages[0])

    def stage(self, rank, chunk):
        """The stage that a chunk of a rank is.

        >>> one_f_one_b(4, 8).stage(2, 0), interleaved_1f1b(4, 8, 2).stage(2, 1)
        (2, 6)
        """
        return self.stages[rank][chunk]

    @cached_property
    def ranks(self):
        """The rank of every stage.

        >>> interleaved_1f1b(2, 2, 2).ranks
        (0, 1, 0, 1)
        """
        rank_of = {stage: rank for rank, row in enumerate(self.stages) for stage in row}
        return tuple(rank_of[stage] for stage in range(self.p * self.v))

    @property
    def messages(self):
        """Messages that each rank sends to others, as (activations, gradients).

        Neighbouring stages on one rank need none. A loop over p > 1 ranks sends 2 m (p v - 1) in
        all, a V 4 m (p - 1).

        >>> one_f_one_b(3, 8).messages, interleaved_1f1b(3, 9, 2).messages
        ([(8, 0), (8, 8), (0, 8)], [(18, 9), (18, 18), (9, 18)])
        """
        ranks = (None, *self.ranks, None)  # so that stage s stands at s + 1

        def sends(rank, step):
            others = (ranks[stage + 1 + step] for stage in self.stages[rank])
            return self.m * sum(other not in (None, rank) for other in others)

        return [(sends(rank, 1), sends(rank, -1)) for rank in range(self.p)]


def gpipe(p, m):
    """All forward passes, then all backward passes, the last micro-batch first.

    Huang et al. (arXiv 1811.06965), figure 2c. Every rank holds m micro-batches at its peak.

    >>> from parlab.pipeline.actions import short_name
    >>> " ".join(map(short_name, gpipe(4, 3).actions[0]))
    'F1 F2 F3 B3 B2 B1'
    """
    p, m, _ = require_sizes(p, m)
    row = (*passes("F", m), *reversed(passes("B", m)))
    return Schedule("GPipe", m, loop(p), (row,) * p, generated=True)


def one_f_one_b(p, m):
    """1F1B: after p - 1 - r forward passes rank r alternates one forward and one backward.

    Narayanan et al. (arXiv 2104.04473), figure 4, top; Megatron's schedule "without interleaving".
    Rank r holds min(m, p - r) micro-batches at its peak.

    >>> from parlab.pipeline.actions import short_name
    >>> for row in one_f_one_b(2, 3).actions:
    ...     print(*map(short_name, row))
    F1 F2 B1 F3 B2 B3
    F1 B1 F2 B2 F3 B3
    """
    p, m, _ = require_sizes(p, m)
    forward, backward = passes("F", m), passes("B", m)
    rows = (alternate(forward, backward, ahead=p - 1 - rank) for rank in range(p))
    return Schedule("1F1B", m, loop(p), tuple(rows), generated=True)


def interleaved_1f1b(p, m, v):
    """1F1B on v chunks a rank: chunk c of rank r is stage c p + r.

    Narayanan et al. (arXiv 2104.04473), section 2.2: a group of micro-batches passes through one
    chunk after the other, and rank r runs (v - 1) g + 2 (p - 1 - r) passes ahead of backward, g
    being the group. The paper needs m to be a multiple of p = g. Here any m will do: it is cut into
    max(1, m // p) groups as equal as can be, the larger first (torch.distributed.pipelining does
    so too, but refuses unequal ones). v = 1 is 1F1B.

    The peak of rank 0 is min(m v, (v - 1) g + 2 p - 1) chunks; for m = 2 p, 3 p, ... that is
    L (1 + (p-1)/(pv)) layers' worth (Korthikanti et al., arXiv 2205.05198, section 4.2.3).

    >>> from parlab.pipeline.actions import short_name
    >>> print(*(short_name(action, 2) for action in interleaved_1f1b(2, 2, 2).actions[1]))
    F1.1 F2.1 F1.2 B1.2 F2.2 B2.2 B1.1 B2.1
    """
    p, m, v = require_sizes(p, m, v)
    if v == 1:
        return one_f_one_b(p, m)
    forward, backward = [], []
    by_chunk = [(passes("F", m, chunk), passes("B", m, chunk)) for chunk in range(v)]
    groups = micro_batch_groups(p, m)
    for group in groups:
        for chunk in range(v):
            forward += by_chunk[chunk][0][group.start : group.stop]
            backward += by_chunk[v - 1 - chunk][1][group.start : group.stop]
    lead = (v - 1) * len(groups[0])
    rows = (alternate(forward, backward, lead + 2 * (p - 1 - rank)) for rank in range(p))
    return Schedule("interleaved 1F1B", m, loop(p, v), tuple(rows), generated=True)


def micro_batch_groups(p, m):
    """The groups in which interleaved 1F1B takes m micro-batches through the chunks.

    >>> micro_batch_groups(4, 10), [len(group) for group in micro_batch_groups(4, 15)]
    ([range(0, 5), range(5, 10)], [5, 5, 5])
    """
    n = max(1, m // p)
    return [range(-(-m * k // n), -(-m * (k + 1) // n)) for k in range(n)]


def loop(p, v=1):
    """Stages of each rank where chunk c of rank r is stage c p + r."""
    return tuple(tuple(range(rank, p * v, p)) for rank in range(p))


def passes(kind, m, chunk=0):
    """One action for each micro-batch; the ranks share these objects."""
    return [Action(kind, micro_batch, chunk) for micro_batch in range(m)]


def alternate(forward, backward, ahead):
    """`ahead` forward passes, then one forward and one backward in turn, then what is left."""
    return (*forward[:ahead], *in_turn(forward[ahead:], backward))


def in_turn(*lists):
    """One of each list in turn; a list that has ended, or has None there, is passed over.

    >>> in_turn([1, 2], [10, 20, 30], [None, 100])
    [1, 10, 2, 20, 100, 30]
    """
    return [entry for turn in zip_longest(*lists) for entry in turn if entry is not None]


def require_sizes(p, m, v=1, *, kinds=2):
    """Return p, m and v as ints from 1 on; together they may make `MAX_ACTIONS`."""
    p = require_int("p", p, minimum=1, why="it counts ranks, one stage or more on each")
    m = require_int("m", m, minimum=1, why="it counts micro-batches")
    v = require_int("v", v, minimum=1, why="it counts chunks of layers on each rank")
    if p * m * v * kinds > MAX_ACTIONS:
        raise ValueError(
            f"p, m and v must make at most {MAX_ACTIONS} actions, got p = {p}, m = {m}, v = {v}: "
            "pipeline_bubble answers any size"
        )
    return p, m, v
