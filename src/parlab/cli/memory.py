"""What one GPU holds during a training step: each item at four moments, and the peak.

Bytes are those of parlab.training_memory: what PyTorch allocates. The context of CUDA,
0.3 to 1.3 GB, and fragmentation come on top.
"""

from parlab.cli.shape import MODEL_HELP, read_shape
from parlab.hardware import gpu
from parlab.memory.moments import MOMENTS
from parlab.memory.states import BYTE_RECIPES
from parlab.memory.step import training_memory
from parlab.table import print_table
from parlab.units import format_bytes, require_int

HELP = "what one GPU holds during a training step"
EPILOG = """\
example:
  parlab memory llama-3-8b --sequence 8192 --gpus 8 --stage 3 --card h100-sxm

--json prints:
  model, parameters        name and number of parameters
  data_parallel_ranks      gpus / (tp x pp)
  pipeline_rank            whose bytes these are: the fullest rank, if none is chosen
  moments                  names of the four moments
  items                    name, group and bytes (at each moment) of everything held
  total_bytes              at each moment
  peak_bytes, peak_moment  the fullest moment
  host_bytes               what --offload moved to the host
  card                     name, usable_bytes, fits, left_bytes (negative if it does
                           not fit); null without --card
"""
_PASSED_ON = ("sequence", "stage", "recipe", "tp", "sequence_parallel", "chunks")
_PASSED_ON += ("pipeline_rank", "recompute", "loss", "offload")


def add_arguments(parser):
    """Add the options; numbers are checked by the functions that use them."""
    add = parser.add_argument
    add("model", metavar="MODEL", help=MODEL_HELP)
    add("--sequence", type=int, required=True, metavar="TOKENS", help="tokens of a sequence")
    add("--micro-batch", type=int, default=1, metavar="N", help="sequences at once (1)")
    add("--gpus", type=int, metavar="N", help="of the whole job (tp x pp: one replica)")
    add("--stage", type=int, default=0, metavar="Z", help="of ZeRO, 0 to 3; 3 is FSDP (0)")
    add("--tp", type=int, default=1, metavar="N", help="ranks of tensor parallelism (1)")
    add("--sequence-parallel", action="store_true", help="cut what tp leaves whole, too")
    add("--pp", type=int, default=1, metavar="N", help="pipeline stages (1)")
    add("--chunks", type=int, default=1, metavar="N", help="of each pipeline rank (1)")
    add("--rank", type=int, dest="pipeline_rank", metavar="R", help="of the pipeline (the fullest)")
    add("--ep", type=int, default=1, metavar="N", help="ranks over which experts spread (1)")
    add("--recompute", default="none", help="none, selective, full or per-op (none)")
    add("--recipe", default="mixed-precision", help=", ".join(BYTE_RECIPES) + " (the first)")
    add("--loss", default="torch", help="torch, megatron or fused (torch)")
    add("--offload", action="store_true", help="move what ZeRO cuts to the host")
    add("--card", metavar="GPU", help="does it fit this one, such as h100-sxm?")


def answer(chosen):
    """Return what --json prints."""
    config = read_shape(chosen.model)
    card = None if chosen.card is None else gpu(chosen.card)
    tp = require_int("tp", chosen.tp, minimum=1)
    replica = tp * require_int("pp", chosen.pp, minimum=1)
    gpus = require_int("gpus", replica if chosen.gpus is None else chosen.gpus, minimum=1)
    if gpus % replica:
        raise ValueError(f"gpus must be a multiple of tp x pp = {replica}, got {gpus}")
    options = {name: getattr(chosen, name) for name in _PASSED_ON}
    options |= {"pipeline": chosen.pp, "expert_parallel": chosen.ep, "n_gpus": gpus // replica}
    step = training_memory(config, chosen.micro_batch, **options)
    return {
        "model": config.name,
        "parameters": config.n_params,
        "data_parallel_ranks": gpus // replica,
        **itemised(step),
        "card": card
        and {
            "name": card.name,
            "usable_bytes": card.usable_bytes,
            "fits": step.peak <= card.usable_bytes,
            "left_bytes": card.usable_bytes - step.peak,
        },
    }


def itemised(step):
    """Return what a TrainingMemory holds, as --json prints it."""
    return {
        "pipeline_rank": step.pipeline_rank,
        "moments": list(MOMENTS),
        "items": [item._asdict() for item in step.items],
        "total_bytes": list(step.totals),
        "peak_bytes": step.peak,
        "peak_moment": step.peak_moment,
        "host_bytes": step.host_bytes,
    }


def show(answer):
    """Print the items as a table, and the verdict below it."""
    billions = answer["parameters"] / 1e9
    print(f"{answer['model']}: {billions:.3g} x 10^9 parameters")
    ranks, rank = answer["data_parallel_ranks"], answer["pipeline_rank"]
    words = "rank" if ranks == 1 else "ranks"
    print(f"one GPU of {ranks} data-parallel {words}, pipeline rank {rank}\n")
    print_items(answer)
    if answer["host_bytes"]:
        print(f"on the host {format_bytes(answer['host_bytes'])}")
    if answer["card"]:
        name, left = answer["card"]["name"], answer["card"]["left_bytes"]
        usable = format_bytes(answer["card"]["usable_bytes"])
        fits = f"fits, {format_bytes(left)} left"
        verdict = fits if left >= 0 else f"does not fit, {format_bytes(-left)} short"
        print(f"{name} has {usable} usable: {verdict}")


def print_items(memory):
    """Print what `itemised` returned as a table, and its peak."""
    rows = [(item["name"], *item["bytes"]) for item in memory["items"]]
    rows.append(("total", *memory["total_bytes"]))
    cells = [(name, *map(format_bytes, figures)) for name, *figures in rows]
    print_table(("item", *memory["moments"]), cells)
    print(f"\npeak {format_bytes(memory['peak_bytes'])}, {memory['peak_moment']}")
