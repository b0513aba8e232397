"""Why one layout loses against another: a broken rule, memory, or the item that takes longer."""

from dataclasses import replace

from parlab.planner.estimate import estimate_layout, layout_memory
from parlab.planner.layout import Layout, refusal
from parlab.units import format_bytes, format_seconds

_TAKES = {  # where an item's name is no singular noun
    "head and loss": "head and loss take",
    "launches": "launches take",
    "pipeline transfers": "pipeline transfers take",
    "slower beside collectives": "work beside collectives takes",
}


def why_not(job, layout, recipe, memory_options, best):
    """Say in one sentence why a layout is not the best of a search."""
    if type(layout) is not Layout:
        raise TypeError(f"layout must be a Layout, got {layout!r:.60}")
    rule = refusal(job.config, job.cluster.n_gpus, layout, job.sequence, job.global_batch)
    if rule:
        return f"Not possible: {rule}."
    made = estimate_layout(job, layout, recipe, memory_options)
    if not made.fits:
        return _does_not_fit(made, recipe, memory_options)
    if best is None:
        return "It fits, though no layout that was searched does."
    if made.seconds <= best.seconds:
        return "It is the best, or as fast."
    worse = made.seconds / best.seconds - 1
    return f"{worse:.1%} slower than the best: {_largest_excess(made, best)}."


def explain(first, second):
    """Say in a few lines why one of two estimates wins, and what each item does to it.

    first, second: Estimates of the same model, cluster and batch.

    Raises TypeError for other things, and ValueError for estimates of different jobs.
    """
    for made in (first, second):
        if not hasattr(made, "step"):
            raise TypeError(f"explain compares two Estimates, got {made!r:.60}")
    if first.job != second.job:
        raise ValueError("explain compares two layouts of one job, got two jobs")
    usable = first.usable_bytes
    if first.fits != second.fits:
        wins, loses = (first, second) if first.fits else (second, first)
        over = format_bytes(loses.peak_bytes - usable)
        return (
            f"{wins.layout} wins: it needs {format_bytes(wins.peak_bytes)} and fits in "
            f"{format_bytes(usable)}.\n"
            f"{loses.layout} needs {format_bytes(loses.peak_bytes)}, {over} too much, "
            f"{_largest_memory(loses)}."
        )
    wins, loses = sorted((first, second), key=lambda made: made.seconds)
    difference = loses.seconds - wins.seconds
    share = difference / wins.seconds
    lines = [
        f"{wins.layout} wins: {format_seconds(wins.seconds)} an iteration.",
        f"{loses.layout} takes {format_seconds(loses.seconds)}, {share:.1%} more:",
    ]
    for name, more in _differences(loses, wins)[:3]:
        if abs(more) >= 0.05 * difference and more:
            sign = "longer" if more > 0 else "shorter"
            lines.append(f"- {name}: {format_seconds(abs(more))} {sign}{_cause(name, loses)}")
    lines.append(
        f"Peak memory: {format_bytes(wins.peak_bytes)} against {format_bytes(loses.peak_bytes)} "
        f"of {format_bytes(usable)}."
    )
    return "\n".join(lines)


def _does_not_fit(made, recipe, memory_options):
    usable = made.usable_bytes
    fitting = [
        words
        for words, other in _changes(made)
        if _peak(made, other, recipe, memory_options) <= usable
    ]
    hint = f"{_either(fitting)} would fit" if fitting else "no single change makes it fit"
    return f"Needs {format_bytes(made.peak_bytes)}, the card has {format_bytes(usable)}: {hint}."


def _either(words):
    """Join words as people do: "a, b or c"."""
    return " or ".join([part for part in (", ".join(words[:-1]), words[-1]) if part])


def _changes(made):
    """(words, Layout) of what people change first, one thing each."""
    layout, job = made.layout, made.job
    others = [(f"ZeRO-{zero}", replace(layout, zero=zero)) for zero in range(layout.zero + 1, 4)]
    ways = ["selective", "per-op", "full"] if layout.recompute == "none" else ["full"]
    if job.flash and "selective" in ways:
        ways.remove("selective")
    others += [
        (f"{way} recomputation", replace(layout, recompute=way))
        for way in ways
        if way != layout.recompute
    ]
    if layout.tp > 1 and not layout.sequence_parallel:
        others.append(("sequence parallelism", replace(layout, sequence_parallel=True)))
    if layout.micro_batch > 1:
        others.append(("micro-batch 1", replace(layout, micro_batch=1)))
    if layout.dp % 2 == 0 and (layout.dp // 2 * layout.cp) % layout.ep == 0:
        others.append((f"TP {2 * layout.tp}", replace(layout, tp=2 * layout.tp, dp=layout.dp // 2)))
        others.append((f"PP {2 * layout.pp}", replace(layout, pp=2 * layout.pp, dp=layout.dp // 2)))
    n = job.cluster.n_gpus
    return [
        (words, other)
        for words, other in others
        if not refusal(job.config, n, other, job.sequence, job.global_batch)
    ]


def _peak(made, layout, recipe, memory_options):
    return layout_memory(made.job, layout, recipe, memory_options).peak


def _differences(made, other):
    """(name, seconds longer) of each item, the largest first."""
    pairs = zip(made.step._fields, made.step, other.step, strict=True)
    rows = [(name.replace("_", " "), ours - theirs) for name, ours, theirs in pairs]
    return sorted(rows, key=lambda row: -abs(row[1]))


def _largest_excess(made, best):
    name, more = max(_differences(made, best), key=lambda row: row[1])
    takes = _TAKES.get(name, f"{name} takes")
    return f"{takes} {format_seconds(more)} longer{_cause(name, made)}"


def _cause(name, made):
    layout, node = made.layout, made.job.cluster.gpus_per_node
    m = made.job.global_batch // (layout.dp * layout.micro_batch)
    if name == "tensor parallel" and layout.tp > 1:
        where = "crosses the node" if layout.tp > node else "stays in the node"
        each = format_seconds(made.step.tensor_parallel / m)
        return f" (TP {layout.tp} {where}: {each} per micro-batch)"
    if name == "bubble" and layout.pp > 1:
        return f" (p = {layout.pp} stages, m = {m} micro-batches, v = {layout.chunks})"
    if name == "data parallel":
        return f" (ZeRO-{layout.zero} over {layout.dp * layout.cp} ranks, {m} micro-batches)"
    if name == "recompute" and layout.recompute != "none":
        return f" ({layout.recompute} recomputation)"
    if name == "launches":
        return f" (micro-batches of {layout.micro_batch})"
    if name == "head and loss":
        return f" (the last of {layout.pp} stages has them alone)"
    return ""


def _largest_memory(made):
    moment = made.memory.totals.index(made.peak_bytes)
    item = max(made.memory.items, key=lambda item: item.bytes[moment])
    return f"most of it {item.name} ({format_bytes(item.bytes[moment])})"
