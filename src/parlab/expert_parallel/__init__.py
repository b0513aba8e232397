"""Layers of experts on arrays: `routing` chooses experts, `load` counts what each gets, `exchange`
sends tokens between simulated ranks, `layer` runs a layer forward and backward, whole or cut.
"""
