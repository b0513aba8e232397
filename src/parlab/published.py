"""Figures that papers and public runs report, as typed tables that tests and chapters share.

`data/published.toml` holds them with source, tag and unit. "formula" means that the source computed
a figure, "measured" that it ran it: a formula must be met exactly, a measurement only explained.
"""

import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from parlab.units import GB, require_choice

TAGS = ("formula", "measured")


@dataclass(frozen=True)
class Published:
    """One table of figures with its provenance; ``columns`` name the fields of each row.

    ``conditions`` states what has to hold for the figures to be comparable.
    """

    id: str
    what: str
    tag: str
    unit: str
    columns: tuple
    values: tuple
    source: str
    as_of: str
    conditions: str

    def __post_init__(self):
        object.__setattr__(self, "tag", require_choice("tag", self.tag, TAGS))
        for row in self.values:
            if len(row) != len(self.columns):
                raise ValueError(
                    f"{self.id}: a row must have {len(self.columns)} values "
                    f"({', '.join(self.columns)}), got {row}"
                )

    @property
    def rows(self):
        """The rows as dicts, made afresh, so that changing one changes nothing here."""
        return [dict(zip(self.columns, row, strict=True)) for row in self.values]


def published_ids():
    """Return the ids of all tables, in the order of the file."""
    return tuple(_tables())


def published_table(table_id):
    """Return a table of published figures by its id, without regard to case.

    >>> published_table("zero-model-states").rows[3]["stage_1_gb"]  # 7.5B on 64 GPUs
    31.41

    Raises ValueError with the nearest ids for an unknown one.
    """
    return _tables()[require_choice("table_id", table_id, _tables())]


def all_reduce_times(gpu_name):
    """Return (size_bytes, seconds) pairs of the measured all-reduce on 8 GPUs of one node.

    The H200 table reports bus bandwidth, so seconds = 2 (n-1)/n x size / busbw with n = 8
    (nccl-tests, PERFORMANCE.md); the A100 table reports the time itself.

    gpu_name: "a100" or "h200".

    >>> size_bytes, seconds = all_reduce_times("a100")[0]
    >>> size_bytes, round(seconds * 1e6, 2)
    (32768, 43.83)
    """
    if require_choice("gpu_name", gpu_name, ("a100", "h200")) == "a100":
        rows = published_table("all-reduce-a100").rows
        return [(row["size_bytes"], row["time_us"] / 1e6) for row in rows]
    rows = published_table("all-reduce-h200").rows
    factor = 2 * (8 - 1) / 8
    return [
        (row["size_bytes"], factor * row["size_bytes"] / (row["busbw_gb_per_s"] * GB))
        for row in rows
    ]


@cache
def _tables():
    path = Path(__file__).parent / "data" / "published.toml"
    tables = {}
    for table_id, row in tomllib.loads(path.read_text(encoding="utf-8")).items():
        columns, values = row.pop("columns"), row.pop("rows")
        tables[table_id] = Published(
            id=table_id, columns=tuple(columns), values=tuple(map(tuple, values)), **row
        )
    return tables
