"""The fastest layouts of a model on a cluster, of all that fit: their time and memory.

Time is counted work over a few efficiencies fitted to published runs (parlab.planner).
Memory is that of `parlab memory`, with the context of CUDA.
"""

import textwrap
from dataclasses import replace

from parlab.cli.grid import WIDTH
from parlab.cli.memory import itemised, print_items
from parlab.cli.shape import MODEL_HELP, read_shape
from parlab.hardware import cluster
from parlab.planner.estimate import estimate
from parlab.planner.layout import FIELDS, Layout
from parlab.planner.reasons import explain
from parlab.planner.search import search
from parlab.table import print_table
from parlab.units import format_bytes, format_seconds, require_choice, require_int, require_number

HELP = "the fastest layouts of a model on a cluster"
LEFT_OF_LAYOUT = 44  # columns of figures
EPILOG = f"""\
examples:
  parlab plan llama-3-70b --cluster hgx-h100 --gpus 64 --sequence 8192 --global-batch 64
  parlab plan llama-3-8b --cluster hgx-a100 --sequence 8192 --global-batch 64 --why dp=8

--why takes what is not the default of
{textwrap.fill(", ".join(FIELDS), 80, initial_indent="  ", subsequent_indent="  ")}

--json prints:
  model, parameters, cluster, nodes, gpus, sequence, global_batch
  usable_bytes  of a card
  considered    layouts that model, batch and cluster allow
  near_ties     how many fit and take at most 2% longer than the best, which is one
  layouts       the fastest of these, at most --top, each with
    layout, iteration_s, tokens_per_second_per_gpu, mfu, hfu, fits
    times       name and seconds of what takes time; they sum to iteration_s
    memory      pipeline_rank, moments, items (name, group, bytes at each moment),
                total_bytes, peak_bytes, peak_moment, host_bytes
    usd_per_billion_tokens  null without --price
  front         the same of all that fit and of which none is both faster and smaller;
                null without --front
  why           layout, reason, estimate (the same; null if a rule forbids the layout)
                and explanation; null without --why
"""


def add_arguments(parser):
    """Add the options; numbers are checked by the functions that use them."""
    add = parser.add_argument
    add("model", metavar="MODEL", help=MODEL_HELP)
    add("--cluster", required=True, help="kind of node, such as hgx-h100")
    add("--gpus", type=int, metavar="N", help="of the whole job (one node)")
    add("--sequence", type=int, required=True, metavar="TOKENS", help="tokens of a sequence")
    add("--global-batch", type=int, required=True, metavar="N", help="sequences of an iteration")
    add("--recipe", default="mixed-precision", help="bytes of a parameter, as in parlab memory")
    add("--top", type=int, default=5, metavar="N", help="list so many layouts (5)")
    add("--front", action="store_true", help="list what trades time for memory, too")
    add("--price", type=float, metavar="USD", help="of a GPU for an hour")
    add("--why", metavar="LAYOUT", help="why is this one not the best? such as dp=64,tp=8")


def answer(chosen):
    """Return what --json prints."""
    config, machines = read_shape(chosen.model), _machines(chosen.cluster, chosen.gpus)
    top = require_int("top", chosen.top, minimum=1)
    price = chosen.price
    if price is not None:
        require_number("price", price, minimum=0)
    asked = None if chosen.why is None else _read_layout(chosen.why)
    job = (chosen.sequence, chosen.global_batch)
    found = search(config, machines, *job, recipe=chosen.recipe)
    why = None
    if asked is not None:
        try:
            made = estimate(config, machines, asked, *job, recipe=chosen.recipe)
        except ValueError:
            made = None  # the reason names the rule
        why = {
            "layout": _fields(asked),
            "reason": found.why_not(asked),
            "estimate": made and _estimate(made, price),
            "explanation": explain(found.best, made) if found.best and made else None,
        }
    return {
        "model": config.name,
        "parameters": config.n_params,
        "cluster": machines.name,
        "nodes": machines.n_nodes,
        "gpus": machines.n_gpus,
        "sequence": chosen.sequence,
        "global_batch": chosen.global_batch,
        "usable_bytes": machines.gpu.usable_bytes,
        "considered": found.considered,
        "near_ties": len(found.near_ties),
        "layouts": [_estimate(made, price) for made in found.near_ties[:top]],
        "front": [_estimate(made, price) for made in found.front] if chosen.front else None,
        "why": why,
    }


def show(answer):
    """Print the list, the fastest in detail, and why the layout that was asked for is not it."""
    print(f"{answer['model']}: {answer['parameters'] / 1e9:.3g} x 10^9 parameters")
    print("cluster {cluster}, GPUs {gpus}, nodes {nodes}".format_map(answer))
    batch = f"sequence {answer['sequence']}, global batch {answer['global_batch']}"
    print(f"{batch}; {answer['considered']} layouts considered\n")
    if answer["layouts"]:
        ties = answer["near_ties"]
        print(f"fastest layouts that fit ({ties} within 2% of the best)")
        _print_list(answer["layouts"])
        _print_details(answer["layouts"][0])
    else:
        print(f"no layout fits: a card has {format_bytes(answer['usable_bytes'])}")
        print("--why says of any layout what it needs")
    if answer["front"]:
        print("\nnone is both faster and smaller than one of these")
        _print_list(answer["front"])
    if answer["why"]:
        print(f"\n{_text(answer['why']['layout'])}")
        lines = [answer["why"]["reason"], *(answer["why"]["explanation"] or "").splitlines()]
        print(*(textwrap.fill(line, WIDTH, subsequent_indent="  ") for line in lines), sep="\n")


def _machines(name, gpus):
    """Return a Cluster of so many GPUs: part of a node, or whole nodes."""
    node = cluster(name)
    gpus = node.n_gpus if gpus is None else require_int("gpus", gpus, minimum=1)
    if gpus <= node.gpus_per_node:
        return replace(node, gpus_per_node=gpus)
    if gpus % node.gpus_per_node:
        raise ValueError(
            f"gpus must be a multiple of the {node.gpus_per_node} of {node.name}, got {gpus}"
        )
    return cluster(name, n_nodes=gpus // node.gpus_per_node)


def _read_layout(text):
    """Return the Layout of a text such as dp=64,tp=8,sequence_parallel=true."""
    given = {}
    for part in text.split(","):
        name, _, value = part.partition("=")
        name = require_choice("a name in why", name, FIELDS)
        if name in given:
            raise ValueError(f"{name} must stand once in why, got {text!r:.60}")
        given[name] = _read_value(name, value.strip(), type(getattr(Layout(), name)))
    return Layout(**given)


def _read_value(name, value, kind):
    if kind is bool:
        return require_choice(name, value, ("false", "true")) == "true"
    if kind is int:
        if not (value.isascii() and value.isdigit() and len(value) < 10):
            raise ValueError(f"{name} must be a whole number in why, got {value!r:.40}")
        return int(value)
    return value


def _fields(layout):
    return {name: getattr(layout, name) for name in FIELDS}


def _text(fields):
    return str(Layout(**fields))


def _estimate(made, price):
    return {
        "layout": _fields(made.layout),
        "iteration_s": made.seconds,
        "tokens_per_second_per_gpu": made.tokens_per_second_per_gpu,
        "mfu": made.mfu,
        "hfu": made.hfu,
        "fits": made.fits,
        "times": [item._asdict() for item in made.times],
        "memory": itemised(made.memory),
        "usd_per_billion_tokens": None if price is None else made.usd_per_billion_tokens(price),
    }


def _print_list(layouts):
    rows = []
    for made in layouts:
        figures = (
            format_seconds(made["iteration_s"]),
            f"{made['tokens_per_second_per_gpu']:.4g}",
            f"{made['mfu']:.1%}",
            format_bytes(made["memory"]["peak_bytes"]),
        )
        # Lines end after a comma, not between a word and its number.
        text = _text(made["layout"]).replace(" ", "\xa0").replace(",\xa0", ", ")
        for line in textwrap.wrap(text, WIDTH - LEFT_OF_LAYOUT):
            rows.append((*figures, line.replace("\xa0", " ")))
            figures = ("",) * 4
    print_table(("iteration", "tokens/s/GPU", "MFU", "peak", "layout"), rows)


def _print_details(made):
    price = made["usd_per_billion_tokens"]
    cost = "" if price is None else f", {price:.4g} USD for 10^9 tokens"
    print(f"\nthe fastest: HFU {made['hfu']:.1%}{cost}\n")
    rows = []
    for item in made["times"]:
        share = item["seconds"] / made["iteration_s"]
        rows.append((item["name"], format_seconds(item["seconds"]), f"{share:.1%}"))
    print_table(("time", "of an iteration", "share"), rows)
    print()
    print_items(made["memory"])
