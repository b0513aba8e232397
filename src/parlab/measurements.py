"""Recorded measurements of cards: files with provenance, whose predictions are computed anew.

`python -m parlab.distributed.gpu` writes them. A file is refused if anything is missing or does not
belong to its configuration. Its predictions are those of today's model; where that has changed
since the run, it says so.
"""

import json
import math
import re
from dataclasses import dataclass, replace
from pathlib import Path

from parlab.gpu_prediction.rows import PARTS, predicted_rows
from parlab.table import print_table
from parlab.units import format_bytes, format_rate, format_seconds

OURS = Path(__file__).parent / "data" / "measurements"
SCHEMA = 1
TEXTS = ("command", "commit", "parlab", "utc", "device", "card", "driver", "cuda", "torch", "numpy")
TEXTS += ("python", "system")
NUMBERS = ("schema", "card_bytes", "free_bytes")
RECORDS = ("configurations", "skipped", "texts")
FIELDS = (*NUMBERS, *TEXTS, *RECORDS, "rows")
UTC = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ")
COMMIT = re.compile(r"unknown|[0-9a-f]{40}(-dirty)?")
# Predictions are sums and quotients of whole numbers, the same on every machine but for rounding.
SAME = 1e-9


@dataclass(frozen=True)
class Row:
    """One item of one part; predicted is None where nothing was, and the row only measures."""

    part: str
    item: str
    unit: str
    predicted: float | None
    measured: float

    @property
    def error(self):
        """(predicted - measured) / measured; None without a prediction, or where either is 0.

        >>> Row("training", "peak", "bytes", 95, 100).error
        -0.05
        """
        if not self.predicted or not self.measured:
            return None
        return (self.predicted - self.measured) / self.measured


@dataclass(frozen=True)
class Measurement:
    """One recorded run of the measuring program.

    card, card_bytes, free_bytes: the card's name, its bytes, and those that were free at the start.
    configurations: {part: what it was run with}. skipped: {part: why}. texts: {part: {name: text}}.
    rows: every item, as predicted today and as measured. changed: what was predicted otherwise at
    the time of the run. command, commit, utc and the versions say how, from what and when.
    """

    schema: int
    command: str
    commit: str
    parlab: str
    utc: str
    device: str
    card: str
    card_bytes: int
    free_bytes: int
    driver: str
    cuda: str
    torch: str
    numpy: str
    python: str
    system: str
    configurations: dict
    rows: tuple[Row, ...]
    skipped: dict
    texts: dict
    changed: tuple[str, ...] = ()

    def part(self, name):
        """The rows of one part, in their order; none if it was skipped."""
        return tuple(row for row in self.rows if row.part == name)

    def value(self, part, item):
        """What was measured for one item.

        Raises ValueError for one that is not there.
        """
        for row in self.part(part):
            if row.item == item:
                return row.measured
        raise ValueError(f"item must be one of part {part!r}, got {item!r}")

    @property
    def mean_peak_error(self):
        """The mean size of the errors of all predicted peaks; None if no peak was measured."""
        errors = [row.error for row in self.rows if "peak" in row.item.split(", ")]
        errors = [abs(error) for error in errors if error is not None]
        return math.fsum(errors) / len(errors) if errors else None

    def show(self, *parts):
        """Print the rows of some parts, or of all, as a table with what it was measured on."""
        print(f"{self.card}, {self.utc}, torch {self.torch}, CUDA {self.cuda}")
        rows = [row for row in self.rows if not parts or row.part in parts]
        show_rows(rows)
        changed = [row for row in rows if f"{row.part}, {row.item}" in self.changed]
        if changed:
            print("predicted otherwise when it was measured:", ", ".join(r.item for r in changed))


def show_rows(rows):
    """Print Rows as a table: item, predicted, measured, error; their part if there are several."""
    lines = []
    for row in rows:
        error = "" if row.error is None else f"{row.error:+.2%}"
        predicted = "" if row.predicted is None else _write(row.unit, row.predicted)
        lines.append((row.part, row.item, predicted, _write(row.unit, row.measured), error))
    head = ("part", "item", "predicted", "measured", "error")
    first = 0 if len({row.part for row in rows}) > 1 else 1
    print_table(head[first:], [line[first:] for line in lines])


def read(data, *, where="the file", dry_run=False):
    """Check a measurement, as a dict or JSON text, and return it as a `Measurement`.

    where: what messages call it. dry_run: True takes the file of a dry run, which is no
    measurement of a card.
    Raises ValueError that names the field for whatever is missing, unknown or of a wrong kind.
    """
    record = _loaded(data, where)
    _require(isinstance(record, dict), where, "", "must be a JSON object")
    for name in FIELDS:
        _require(name in record, where, name, "is missing")
    for name in record:
        _require(name in FIELDS, where, name, f"is unknown: there are {', '.join(FIELDS)}")
    for name in TEXTS:
        good = isinstance(record[name], str) and record[name].strip()
        _require(good, where, name, f"must be text, got {record[name]!r}")
    for name in NUMBERS:
        good = type(record[name]) is int and record[name] > 0
        _require(good, where, name, f"must be an int above 0, got {record[name]!r}")
    for name in RECORDS:
        _require(isinstance(record[name], dict), where, name, "must be an object")
    _require(record["schema"] == SCHEMA, where, "schema", f"must be {SCHEMA}: record it anew")
    _require(UTC.fullmatch(record["utc"]), where, "utc", "must be like 2026-01-31T12:00:00Z")
    _require(COMMIT.fullmatch(record["commit"]), where, "commit", "must be a commit or 'unknown'")
    devices = ("cuda", "cpu") if dry_run else ("cuda",)
    why = f"must be cuda, got {record['device']!r}: a dry run is no measurement of a card"
    _require(record["device"] in devices, where, "device", why)
    _check_parts(record, where)
    then = _checked_rows(record, where)
    predicted = {
        part: predicted_rows(part, configuration)
        for part, configuration in record["configurations"].items()
    }
    rows = tuple(replace(row, predicted=predicted[row.part][row.item].value) for row in then)
    changed = tuple(
        f"{old.part}, {old.item}"
        for old, new in zip(then, rows, strict=True)
        if not _same(old.predicted, new.predicted)
    )
    return Measurement(**{**record, "rows": rows, "changed": changed})


def measurements(folder=None):
    """Return all recorded measurements, oldest first.

    folder: None is those that came with the package and your own, in "measurements" here or one
        folder up, where a notebook finds it.
    Raises ValueError, with the file's name, for one that is refused.
    """
    folders = [OURS, *_yours()] if folder is None else [Path(folder)]
    found = [
        read(path.read_text(encoding="utf-8"), where=path.name)
        for folder in folders
        for path in sorted(folder.glob("*.json"))
    ]
    return sorted(found, key=lambda measurement: measurement.utc)


def newest(card=None, folder=None):
    """Return the newest measurement, of cards whose name contains `card`; None if there is none.

    >>> newest("no such card") is None
    True
    """
    wanted = "" if card is None else card.lower()
    found = [each for each in measurements(folder) if wanted in each.card.lower()]
    return found[-1] if found else None


def _yours():
    places = (Path("measurements"), Path("..") / "measurements")
    return [place for place in places if place.is_dir()][:1]


def _loaded(data, where):
    if not isinstance(data, str):
        return data
    try:
        return json.loads(data)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: is no JSON: {error}") from None


def _check_parts(record, where):
    for part in PARTS:
        times = (part in record["configurations"]) + (part in record["skipped"])
        why = f"must have part {part!r} there or in skipped, and not in both"
        _require(times == 1, where, "configurations", why)
    for name in RECORDS:
        for part in record[name]:
            _require(part in PARTS, where, name, f"has an unknown part {part!r}")
    for part, reason in record["skipped"].items():
        good = isinstance(reason, str) and reason.strip()
        _require(good, where, "skipped", f"must give a reason for {part!r}")


def _checked_rows(record, where):
    good = isinstance(record["rows"], list) and record["rows"]
    _require(good, where, "rows", "must be a list, and not an empty one")
    rows = []
    for number, row in enumerate(record["rows"]):
        fields = tuple(Row.__dataclass_fields__)
        good = isinstance(row, dict) and set(row) == set(fields)
        _require(good, where, f"rows[{number}]", f"must have {', '.join(fields)}, got {row!r:.80}")
        name = f"rows[{number}] ({row['part']}, {row['item']})"
        measured = row["measured"]
        good = type(measured) in (int, float) and math.isfinite(measured)
        _require(good, where, name, f"must have a measured number, got {measured!r}")
        rows.append(Row(**row))
    for part, configuration in record["configurations"].items():
        _compare(part, configuration, [row for row in rows if row.part == part], where)
    for row in rows:
        why = f"belongs to part {row.part!r}, which has no configuration"
        _require(row.part in record["configurations"], where, row.item, why)
    return tuple(rows)


def _compare(part, configuration, rows, where):
    """The rows of a part must be those that today's model predicts, in the same units."""
    try:
        today = predicted_rows(part, configuration)
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{where}: configurations of {part!r}: {error}") from None
    named = {row.item: row for row in rows}
    _require(len(named) == len(rows), where, part, "has an item twice")
    for item in today:
        _require(item in named, where, part, f"has no row {item!r}")
    for item, row in named.items():
        _require(item in today, where, part, f"has a row {item!r} that nothing predicts")
        unit, _ = today[item]
        _require(row.unit == unit, where, f"{part}, {item}", f"must be in {unit}, got {row.unit}")


def _same(old, new):
    if old is None or new is None:
        return old is new
    good = type(old) in (int, float)
    return good and math.isclose(old, new, rel_tol=SAME)


def _require(good, where, field, why):
    if not good:
        raise ValueError(f"{where}: {field} {why}" if field else f"{where} {why}")


def _write(unit, value):
    writers = {"bytes": format_bytes, "s": format_seconds, "bytes/s": format_rate}
    if unit == "yes or no":
        return "yes" if value else "no"
    if unit in writers:
        return writers[unit](value)
    if unit == "FLOP/s":
        return f"{value / 1e12:.4g} TFLOP/s"
    if unit == "parameters/s":
        return f"{value / 1e6:.4g} million/s"
    return f"{value:.4g}" if unit in ("ratio", "absolute") else f"{value:.4g} {unit}"
