"""All exercises, in the order of the chapters."""

from parlab.exercises import (
    activations,
    averages,
    collective_cost,
    crossover,
    data_parallel,
    ddp_by_hand,
    fsdp_by_hand,
    hierarchical,
    integer_mean,
    kv_heads,
    layout,
    memory_states,
    memory_traffic,
    params,
    pipeline,
    pipeline_grid,
    pipeline_order,
    ring,
    ring_by_messages,
    scatter_gather,
    sharded_optimizer,
    sizing,
    splits,
    tensor_blocks,
    tensor_linear,
    tensor_mlp,
    tensor_on_ranks,
    two_stage_pipeline,
)

TOPICS = (
    *(ring, scatter_gather, hierarchical, collective_cost, crossover, integer_mean),
    ring_by_messages,
    *(data_parallel, averages, ddp_by_hand),
    *(tensor_linear, tensor_mlp, tensor_blocks, kv_heads, tensor_on_ranks),
    *(memory_states, memory_traffic, params, sharded_optimizer, fsdp_by_hand),
    *(activations, sizing),
    *(splits, pipeline, pipeline_order, pipeline_grid, layout, two_stage_pipeline),
)

_ALL = [exercise for topic in TOPICS for exercise in topic.EXERCISES]

EXERCISES = {exercise.name: exercise for exercise in sorted(_ALL, key=lambda e: e.chapter)}
