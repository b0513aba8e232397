"""Measure what the formulas predict on this machine's card; without one, on tensors without data.

python -m parlab.distributed.gpu --help
"""
