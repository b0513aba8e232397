"""The table of functions that compute the ledger's figures, by name."""

from parlab.ledger import (
    ways_arrays,
    ways_cards,
    ways_cuts,
    ways_memory,
    ways_pipeline,
    ways_planner,
    ways_traffic,
)


def _public_functions(module):
    return {
        name: value
        for name, value in vars(module).items()
        if callable(value) and value.__module__ == module.__name__ and not name.startswith("_")
    }


WAYS = {
    **_public_functions(ways_cards),
    **_public_functions(ways_memory),
    **_public_functions(ways_traffic),
    **_public_functions(ways_arrays),
    **_public_functions(ways_cuts),
    **_public_functions(ways_pipeline),
    **_public_functions(ways_planner),
}
