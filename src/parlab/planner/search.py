"""Find the best layouts of a model on a cluster: all are considered, few are computed.

Layouts that share tp, cp, ep, micro-batch, recomputation and sequence parallelism share a Block,
and their ranks do the same work: more pipeline stages leave a rank fewer layers and, with fewer
replicas, as many more micro-batches. So no layout of a Block is faster than that work; once it
exceeds the best iteration so far, the Block, and all with more work, need only be counted.
"""

from bisect import bisect_left, bisect_right
from functools import cached_property
from typing import NamedTuple

from parlab.memory.layer import ask, layer_step
from parlab.memory.rank import rank_params, rank_states
from parlab.memory.step import CUDA_CONTEXT_BYTES
from parlab.planner.efficiencies import FITTED
from parlab.planner.estimate import estimate_layout, layout_memory, make_job
from parlab.planner.layout import MOST_RANKS, Layout
from parlab.planner.reasons import why_not
from parlab.planner.space import ROUNDING, Degrees, blocks, count, cuts
from parlab.planner.step import block, data_parallel_seconds, pipeline_seconds
from parlab.units import require_int

TIE = 1.02  # of the best layout's time


class Candidate(NamedTuple):
    """A layout by its time, as a search compares them, and less than its peak."""

    seconds: float
    least_bytes: float
    degrees: Degrees
    pp: int
    dp: int
    chunks: int
    schedule: str
    zero: int
    replicas: int

    def layout(self):
        """The Layout itself."""
        shared = {name: getattr(self.degrees, name) for name in Degrees._fields[1:-1]}
        own = {name: getattr(self, name) for name in Candidate._fields[3:]}
        return Layout(**shared, **own)


class SearchResult:
    """What a search found; the front is computed when it is asked for.

    best: the Estimate of the fastest layout that fits, None if none does. near_ties: Estimates of
    all that fit and take at most 2% longer, the best first. considered: layouts that the model, the
    batch and the cluster allow. candidates: those that no bound on time or memory ruled out.
    """

    def __init__(self, job, recipe, memory_options, limits):
        self._job, self._recipe, self._memory_options = job, recipe, memory_options
        self._blocks = sorted(blocks(job, *limits))
        self.considered = sum(count(degrees) for degrees in self._blocks)
        self.candidates = 0
        self.near_ties = self._fastest()
        self.best = self.near_ties[0] if self.near_ties else None

    @cached_property
    def front(self):
        """Estimates that fit and of which none is both faster and smaller, the fastest first."""
        usable = self._job.cluster.gpu.usable_bytes
        times, peaks, found = [], [], []  # of the front: times rise, peaks fall

        def is_dominated(seconds, n_bytes):
            before = bisect_right(times, seconds)
            return n_bytes > usable or (before and peaks[before - 1] <= n_bytes)

        for degrees in self._blocks:
            for candidate in sorted(self._candidates(degrees, is_dominated)):
                seconds = candidate.seconds
                if is_dominated(seconds, candidate.least_bytes):
                    continue
                peak = self._peak(candidate)
                if is_dominated(seconds, peak):
                    continue
                at = bisect_left(times, seconds)
                beaten = at
                while beaten < len(peaks) and peaks[beaten] >= peak:
                    beaten += 1
                times[at:beaten], peaks[at:beaten] = [seconds], [peak]
                found[at:beaten] = [candidate]
        return [self._estimate(candidate) for candidate in found]

    @cached_property
    def finalists(self):
        """(simulated seconds, Estimate) of at most five near-ties, the fastest first.

        The fastest of each pipeline, schedule and cut of the model: replicas of shards that differ
        by less than what a simulation adds are no other finalists.
        """
        kinds = {}
        for made in self.near_ties:
            a = made.layout
            kinds.setdefault((a.tp, a.pp, a.cp, a.ep, a.chunks, a.schedule), made)
        pairs = [(made.simulated_seconds, made) for made in list(kinds.values())[:5]]
        return sorted(pairs, key=lambda pair: pair[0])

    def why_not(self, layout):
        """Say in one sentence why a layout is not the best.

        It breaks a rule, it does not fit (and which one change would), or it is slower (and what
        takes most of the difference).
        """
        return why_not(self._job, layout, self._recipe, self._memory_options, self.best)

    def _fastest(self):
        usable, limit, found = self._job.cluster.gpu.usable_bytes, float("inf"), []

        def is_hopeless(seconds, n_bytes):
            return seconds > limit or n_bytes > usable

        for degrees in self._blocks:
            if degrees.least > limit:
                break
            for candidate in sorted(self._candidates(degrees, is_hopeless)):
                if candidate.seconds > limit:
                    break
                if self._peak(candidate) <= usable:
                    found.append(candidate)
                    limit = min(limit, TIE * candidate.seconds * (1 + ROUNDING))
        made = [self._estimate(candidate) for candidate in found if candidate.seconds <= limit]
        made.sort(key=lambda estimate: estimate.seconds)
        return [each for each in made if each.seconds <= TIE * made[0].seconds]

    def _candidates(self, degrees, is_hopeless):
        """Yield the Candidates of a Block, less those that their times and least bytes rule out.

        Time is that of the work, of the pipeline and of data parallelism, each of which depends on
        few degrees; so is the least memory: the states, and the layers' activations.
        """
        job, (least, tp, cp, ep, b, recompute, parallel, pipelines) = self._job, degrees
        config, activations = job.config, self._activations(degrees)
        if is_hopeless(least, activations + self._least_states):
            return
        made = block(job, tp, cp, ep, b, recompute, parallel)
        each = made.forward + made.backward
        offload = self._memory_options.get("offload")
        for pp, dp, m, ways in pipelines:
            last, first = (rank_params(config, tp, pp, rank, ep) for rank in (pp - 1, 0))
            base = m * (last.layers * each + made.head)
            if is_hopeless(base, activations + self._least_states):
                continue
            ranks, stride = dp * cp, tp * cp * dp
            runs = []
            for chunks, schedule in ways:
                more = pipeline_seconds(job, made, last.layers, pp, stride, m, chunks, schedule)
                runs.append((base + sum(more), chunks, schedule))
            quickest = min(runs)[0]
            for zero, replicas in cuts(ranks, ep):
                states = rank_states(first, job.recipe, ranks // replicas, ep, zero)[:3]
                # With one micro-batch gradients come when activations go.
                held = 0 if offload else sum(states) - (states[1] if m == 1 else 0)
                more = sum(data_parallel_seconds(job, made, last, ranks, tp, ep, m, zero, replicas))
                if is_hopeless(quickest + more, activations + held):
                    continue
                for seconds, chunks, schedule in runs:
                    if not is_hopeless(seconds + more, activations + held):
                        self.candidates += 1
                        yield Candidate(
                            seconds + more,
                            activations + held,
                            degrees,
                            pp,
                            dp,
                            chunks,
                            schedule,
                            zero,
                            replicas,
                        )

    @cached_property
    def _least_states(self):
        """Bytes of weights and optimizer where every GPU has its own share of them."""
        w, _, k = self._job.recipe
        offload = self._memory_options.get("offload")
        return 0 if offload else (w + k) * self._job.config.n_params / self._job.cluster.n_gpus

    def _activations(self, degrees):
        """Bytes that the layers of the first pipeline rank hold at its peak, with one chunk."""
        job, (_, tp, cp, _, b, recompute, parallel, _) = self._job, degrees
        tokens = (b, job.sequence // cp, tp, parallel, job.dropout, job.flash, 1, recompute)
        return job.config.layers * layer_step(job.config, *tokens).kept

    def _peak(self, candidate):
        memory = layout_memory(self._job, candidate.layout(), self._recipe, self._memory_options)
        return memory.peak

    def _estimate(self, candidate):
        return estimate_layout(self._job, candidate.layout(), self._recipe, self._memory_options)


def search(
    config,
    cluster,
    sequence,
    global_batch,
    *,
    recipe="mixed-precision",
    flash=True,
    dropout=False,
    fused=True,
    overlap=True,
    efficiencies=FITTED,
    most_tp=None,
    most_cp=None,
    **memory_options,
):
    """Find the fastest layouts that fit, of all that the rules of `Layout` allow.

    All divisors are tried: tp, cp, pp, ep, micro-batch, chunks; stages 0 to 3 of ZeRO, 1F1B and
    ZB-H1, all ways of recomputation that apply, with and without sequence parallelism.

    config: a ModelConfig. cluster: a Cluster, all of whose GPUs are used. sequence: s, tokens.
    global_batch: sequences of an iteration. most_tp, most_cp: largest degrees to try; None is any.
    The rest as in `estimate`.

    Raises ValueError or TypeError as `estimate`, and for more than 10^6 GPUs.

    >>> from parlab.hardware import cluster
    >>> from parlab.models import model
    >>> found = search(model("llama-3-8b"), cluster("hgx-h100"), 8192, 64)
    >>> print(found.best.layout, found.considered)
    dp 4, cp 2, ZeRO-1, b 1 6384
    """
    job = ask(
        make_job,
        (config, cluster, sequence, global_batch, recipe)
        + (flash, dropout, fused, overlap, efficiencies),
    )
    require_int("n_gpus", cluster.n_gpus, minimum=1, maximum=MOST_RANKS)
    limits = [
        cluster.n_gpus if most is None else require_int(name, most, minimum=1)
        for name, most in (("most_tp", most_tp), ("most_cp", most_cp))
    ]
    return SearchResult(
        job, recipe, {"context_bytes": CUDA_CONTEXT_BYTES, **memory_options}, limits
    )
