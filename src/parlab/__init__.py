"""The arithmetic of parallel training: formulas, counted simulations and real runs that agree.

`import parlab as pl` loads nothing else; every name below is imported when it is first used.
"""

from parlab._lazy import lazy_namespace

__getattr__, __dir__, __all__ = lazy_namespace(
    __name__,
    {
        "table": ("print_table",),
        "units": ("format_bytes", "format_rate", "format_seconds"),
        "hardware": ("Cluster", "GPU", "Link", "bandwidth_ladder", "cluster", "gpu", "link"),
        "published": ("all_reduce_times", "published_ids", "published_table"),
        "fit": ("fit_latency_bandwidth",),
        "collectives.schedules": (
            "Send",
            "binomial_all_reduce_schedule",
            "broadcast_schedule",
            "halving_doubling_schedule",
            "hierarchical_schedule",
            "holdings",
            "naive_all_reduce_schedule",
            "ring_all_gather_schedule",
            "ring_all_reduce_schedule",
            "ring_reduce_scatter_schedule",
        ),
        "collectives.cost": (
            "all_reduce_cost",
            "bus_bandwidth",
            "bytes_leaving_nodes",
            "hierarchical_all_reduce_cost",
            "padded_elements",
            "price",
            "ring_tree_crossover_bytes",
            "traffic",
            "tree_all_reduce_cost",
        ),
        "collectives.simulate": (
            "broadcast",
            "halving_doubling_all_reduce",
            "hierarchical_all_reduce",
            "naive_all_reduce",
            "ring_all_gather",
            "ring_all_reduce",
            "ring_reduce_scatter",
            "run_on_arrays",
            "tree_all_reduce",
        ),
        "distributed.launch": ("run_ranks",),
    },
    submodules=(
        "collectives",
        "distributed",
        "hardware",
        "panels",
        "plots",
        "published",
        "units",
        "whatif",
    ),
)
