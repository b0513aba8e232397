"""The ledger in print: lines of at most 88 columns, for a terminal and for a page of the book."""

from math import isfinite
from textwrap import wrap

from parlab.ledger.entries import ROUTES
from parlab.table import print_table

WIDTH = 88


def print_summary(entries):
    """Print how many figures there are by route, and how many are met, and missed."""
    rows = []
    for route in ROUTES:
        of_route = [entry for entry in entries if entry.route == route]
        rows.append((route, *_counts(of_route)))
    print_table(("route", "figures", "met", "missed"), [*rows, ("together", *_counts(entries))])


def print_missed(entries):
    """Print the groups with figures that are missed: how many of all, the worst, and why."""
    for name, group in _groups(entries):
        missed = [entry for entry in group if entry.verdict == "missed"]
        if missed:
            worst = f"{_percent(missed[0].error)} {missed[0].id.removeprefix(name).strip('/')}"
            print(f"{name}: {len(missed)} of {len(group)}, worst {worst.strip()}")
            if any(entry.unexplained for entry in missed):
                print("    NOT EXPLAINED")
            _print_wrapped(missed[0].why)


def print_entries(entries):
    """Print one line an entry, in the given order."""
    print(_line("", "error", "allowed", "published", "ours", "unit", "figure"))
    for entry in entries:
        allowed = _percent(entry.tolerance, "") if entry.tolerance else "exact"
        numbers = _percent(entry.error), allowed, _number(entry.published), _number(entry.ours)
        print(_line(entry.verdict, *numbers, entry.unit, entry.id))


def print_sources(entries):
    """Print what each group of entries holds, its route and its source, in order of names."""
    for name, group in sorted(_groups(entries)):
        routes = ", ".join(route for route in ROUTES if any(e.route == route for e in group))
        print(f"{name} ({routes})")
        _print_wrapped(group[0].what)
        _print_wrapped(group[0].source)
        for run in dict.fromkeys(entry.run for entry in group if entry.run):
            _print_wrapped(f"run: {run}")


def _groups(entries):
    """Return (name, entries) of each group, in the order in which the entries have them."""
    groups = {}
    for entry in entries:
        groups.setdefault(entry.group, []).append(entry)
    return list(groups.items())


def _counts(entries):
    met = sum(entry.verdict == "met" for entry in entries)
    return len(entries), met, len(entries) - met


def _line(verdict, error, allowed, published, ours, unit, figure):
    line = f"{verdict:6} {error:>7} {allowed:>7} {published:>10} {ours:>10} {unit:4} {figure}"
    return line if len(line) <= WIDTH else line[: WIDTH - 1] + "…"


def _percent(error, sign="+"):
    if not isfinite(error):
        return "other"
    if not error:
        return "0"
    return f"{100 * error:{sign}.3g}%" if abs(error) >= 1e-4 else "<0.01%"


def _number(value):
    if value is None:
        return "-"
    if isinstance(value, tuple):
        text = " ".join(map(str, value))
        return text if len(text) <= 10 else text[:9] + "…"
    return f"{value:.5g}"


def _print_wrapped(text):
    for line in wrap(text, WIDTH - 4, break_on_hyphens=False):
        print(f"    {line}")
