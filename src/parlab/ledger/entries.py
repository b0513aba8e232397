"""Entries of the ledger: data/ledger.toml names the figures, the ways compute ours.

An entry holds a figure that somebody published, or that a chapter claims, beside what parlab says
now. Adding a figure is adding data; the head of the file explains its fields.
"""

import re
import tomllib
from dataclasses import dataclass
from itertools import product
from math import fsum, inf
from pathlib import Path

from parlab import accuracy
from parlab.ledger.formula_text import value_of
from parlab.ledger.ways import WAYS
from parlab.published import published_table
from parlab.units import GB, GIB, MB, require_choice

ROUTES = ("formula", "simulation", "real run", "measured elsewhere")
# Ways return plain SI numbers; an entry shows them in its source's unit.
UNITS = {"MB": MB, "GB": GB, "GiB": GIB, "GB/s": GB, "1e9": GB, "TFLOP/s": 1e12}
UNITS |= {"%": 0.01, "ms": 1e-3, "us": 1e-6}
ROUNDING = 1e-12  # a smaller error is that of floating-point sums, and counts as none


@dataclass(frozen=True)
class Entry:
    """One figure, published and ours, in `unit`; a tuple of ints is compared as a whole.

    route: how ours was found: "formula", "simulation" (counted in a schedule or on arrays), "real
        run" (the committed output of a chapter), or "measured elsewhere" (a formula of ours against
        what others measured).
    error: relative, ours / published - 1; of a tuple the largest. Of a mean over a group, whose
        published and ours are None, the mean of the errors' sizes.
    tolerance: the size of the error up to which the figure is met.
    accepted: the size up to which `why` explains a miss; None if nothing does.
    run: the chapter and the test that perform a real run.
    printed: the line of the chapter that claims the figure, or reports the run.
    """

    id: str
    group: str
    what: str
    source: str
    route: str
    published: float | tuple | None
    ours: float | tuple | None
    unit: str
    error: float
    tolerance: float
    accepted: float | None
    why: str
    run: str = ""
    chapter: str = ""
    printed: str = ""

    @property
    def verdict(self):
        """ "met" or "missed"."""
        return "met" if abs(self.error) <= self.tolerance else "missed"

    @property
    def unexplained(self):
        """True if the figure is missed, and by more than `why` explains."""
        most = self.tolerance if self.accepted is None else self.accepted
        return self.verdict == "missed" and abs(self.error) > most


def ledger(text=None):
    """Return all entries, computed now, worst first: by the size of the relative error.

    text: TOML in the form of data/ledger.toml; None reads that file.

    Raises ValueError for a group without a source, an unknown way or route, or one id twice.

    >>> entries = ledger()
    >>> abs(entries[0].error) == max(abs(entry.error) for entry in entries)
    True
    """
    entries = [entry for group in _data(text)["figures"] for entry in _entries(group)]
    seen = set()
    for entry in entries:
        if entry.id in seen:
            raise ValueError(f"{entry.id}: an id must be unique, give its group a longer key")
        seen.add(entry.id)
    # Rounded, so that figures which rounding alone tells apart stay in the order of the file.
    return sorted(entries, key=lambda entry: -round(abs(entry.error), 12))


def not_held(text=None):
    """Return {published table, or table.column, or table.row: why no entry holds us to it}."""
    return _data(text)["not_held"]


def _data(text):
    if text is None:
        path = Path(__file__).parent.parent / "data" / "ledger.toml"
        text = path.read_text(encoding="utf-8")
    return {"figures": [], "not_held": {}, **tomllib.loads(text)}


def _entries(group):
    """Return the entries of one group: each of its figures by each of its routes, then the mean."""
    name = group["group"]
    chapter = group.get("chapter", "")
    page = f"notebooks/{chapter}.ipynb" if chapter else ""
    if "table" in group:
        source = published_table(group["table"]).source
    else:
        source = group.get("source", page)  # a chapter's own claim
    if not (source.strip() and group["what"].strip()):
        raise ValueError(f"{name}: a group must say what it holds, and its source")
    always = {"group": name, "what": group["what"], "why": group.get("why", "")}
    always["chapter"] = chapter
    entries = []
    for (fields, published), (route, how) in product(_figures(group), group["by"].items()):
        route = require_choice(f"{name}: route", route, ROUTES)
        fields = {**group.get("with", {}), **fields}
        printed, label = fields.pop("printed", ""), fields.get("label", "")
        key = group.get("key", ["label"] if label else [])
        parts = [name, *(_short(fields[field]) for field in key)]
        fields.pop("label", None)
        if route == "real run":
            ours = number_in(printed)
        else:
            how = require_choice(f"{name}: way", how, WAYS)
            ours = WAYS[how](**fields)
            ours = tuple(ours) if isinstance(ours, list) else ours / UNITS.get(group.get("unit"), 1)
        entries.append(
            Entry(
                id="/".join(parts if len(group["by"]) == 1 else [*parts, route]),
                source=source,
                route=route,
                published=published,
                ours=ours,
                unit=group.get("unit", ""),
                error=_error(ours, published),
                tolerance=_size_allowed(group, "tolerance", "within", published, 0),
                accepted=_size_allowed(group, "accepted", "accepted_within", published, None),
                run=f"{page}, {how}" if route == "real run" else "",
                printed=printed,
                **always,
            )
        )
    if "mean" in group:
        mean = fsum(abs(entry.error) for entry in entries) / len(entries)
        entries.append(
            Entry(
                id=f"{name}/mean",
                source=source,
                route=entries[0].route,
                published=None,
                ours=None,
                unit="",
                error=mean,
                tolerance=group["mean"],
                accepted=group.get("mean_accepted"),
                **always,
            )
        )
    return entries


def _figures(group):
    """Yield (arguments, published) for each figure of a group."""
    if group.get("runs"):
        for run in accuracy.runs(group["table"]):
            yield {"table": run.table, "run": run.name}, run.seconds
        return
    if "table" not in group:
        for cells in group["rows"]:
            row = dict(zip(group["columns"], cells, strict=True))
            published = row.pop("published") if "published" in row else number_in(row["printed"])
            yield row, tuple(published) if isinstance(published, list) else published
        return
    for row in published_table(group["table"]).rows:
        if all(row[field] in allowed for field, allowed in group.get("only", {}).items()):
            fields = {field: row[field] for field in group.get("uses", [])}
            for column, more in group["columns"].items():
                published = row[column]
                if isinstance(published, str):
                    published = value_of(published, **group["at"])
                yield {**fields, **more}, published


def number_in(printed):
    """Return the number, or the list of ints, that a line of output has between « and ».

    >>> number_in("reshard True : hand «1.500» x"), number_in("1F1B  «[4, 3, 2, 1]»")
    (1.5, (4, 3, 2, 1))
    """
    marked = re.findall("«(.*?)»", printed)
    if len(marked) != 1:
        raise ValueError(f"printed must mark one number with « and », got {printed!r}")
    text = marked[0].replace(",", "" if marked[0][0] != "[" else " ")
    return tuple(map(int, text[1:-1].split())) if text[0] == "[" else float(text)


def _size_allowed(group, relative, absolute, published, default):
    """Return a tolerance as the size of a relative error."""
    if absolute in group:
        return group[absolute] / abs(published)
    chosen = group.get(relative, default)
    if chosen != "printed":
        return chosen
    decimals = len(str(published).partition(".")[2])
    # Whole numbers are exact: nobody rounds 120 to a unit. (The 1 + 1e-6 is for ties.)
    return 0.5 * (1 + 1e-6) * 10**-decimals / abs(published) if decimals else 0


def _error(ours, published):
    if isinstance(published, tuple):
        if not isinstance(ours, tuple) or len(ours) != len(published):
            return inf
        return max(map(_error, ours, published), key=abs)
    if ours == published or (published and abs(ours / published - 1) <= ROUNDING):
        return 0.0
    return ours / published - 1 if published else inf


def _short(value):
    return f"{value:g}" if type(value) is int and value % 10**6 == 0 else str(value)
