"""Tensor parallelism on arrays: `linear` cuts a layer or an MLP, `step` adds backward and counts
bytes, `attention` cuts heads and gated MLPs, `vocabulary` the embedding and the loss.
"""
