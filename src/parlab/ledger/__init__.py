"""The ledger: every figure that we hold ourselves to, beside what parlab computes now."""

from parlab.ledger.entries import Entry, ledger, not_held
from parlab.ledger.report import print_entries, print_missed, print_sources, print_summary

__all__ = [
    "Entry",
    "ledger",
    "not_held",
    "print_entries",
    "print_missed",
    "print_sources",
    "print_summary",
]
