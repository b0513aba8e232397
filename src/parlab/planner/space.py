"""The space that a search considers: every layout that the rules allow, by what layouts share."""

from functools import cache
from typing import NamedTuple

from parlab.planner.step import block

ROUNDING = 1e-9  # sums of the same terms in another order


class Degrees(NamedTuple):
    """What the layouts of a Block share, and the least time that they need."""

    least: float
    tp: int
    cp: int
    ep: int
    micro_batch: int
    recompute: str
    sequence_parallel: bool
    pipelines: tuple  # (pp, dp, m, ((chunks, schedule), ...)) of each length of the pipeline


def blocks(job, most_tp, most_cp):
    """Yield the Degrees of every Block that has a layout."""
    config, world = job.config, job.cluster.n_gpus
    s, batch, layers = job.sequence, job.global_batch, config.layers
    cut = (config.heads, config.kv_heads, config.ffn, config.vocab)
    ways = ["none", "full"] + ([] if job.flash else ["selective"])
    ways += ["per-op"] if config.experts == 1 else []
    for tp in _divisors(world):
        if tp > most_tp or any(size % tp for size in cut):
            continue
        for cp in _divisors(world // tp):
            if cp > most_cp or (cp > 1 and s % (2 * cp)):
                continue
            rest = world // (tp * cp)
            parallel = (False, True) if tp > 1 and (s // cp) % tp == 0 else (False,)
            for ep in _divisors(config.experts):
                for b in _divisors(batch):
                    pipelines = tuple(_pipelines(rest, cp, ep, b, batch, layers))
                    if not pipelines:
                        continue
                    work = layers * batch / (b * rest)
                    for recompute in ways:
                        for sp in parallel:
                            made = block(job, tp, cp, ep, b, recompute, sp)
                            each = made.forward + made.backward
                            least = work * each * (1 - ROUNDING)
                            yield Degrees(least, tp, cp, ep, b, recompute, sp, pipelines)


def _pipelines(rest, cp, ep, micro_batch, batch, layers):
    """Yield (pp, dp, m, ways to run it) of each pipeline that layers and batch allow."""
    for pp in _divisors(rest):
        dp = rest // pp
        if layers % pp or batch % (dp * micro_batch) or dp * cp % ep:
            continue
        m = batch // (dp * micro_batch)
        ways = [(1, "1F1B")]
        if pp > 1:
            if m >= pp:
                ways.append((1, "ZB-H1"))
            if m % pp == 0:
                ways += [(chunks, "1F1B") for chunks in _divisors(layers // pp)[1:]]
        yield pp, dp, m, tuple(ways)


def count(degrees):
    """Return the number of layouts of a Block."""
    return sum(
        len(ways) * len(cuts(dp * degrees.cp, degrees.ep)) for _, dp, _, ways in degrees.pipelines
    )


@cache
def cuts(ranks, ep):
    """(stage of ZeRO, replicas) that a number of data-parallel ranks allows."""
    if ranks == 1:
        return ((0, 1),)
    replicas = [r for r in _divisors(ranks)[:-1] if (ranks // r) % ep == 0]
    return ((0, 1), *((zero, r) for zero in (1, 2, 3) for r in replicas))


@cache
def _divisors(n):
    small = [d for d in range(1, int(n**0.5) + 1) if n % d == 0]
    return small + [n // d for d in reversed(small) if d * d != n]
