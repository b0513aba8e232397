"""Measure what the formulas predict: one command, a file with provenance.

python -m parlab.distributed.gpu                      # on a card; writes measurements/
python -m parlab.distributed.gpu --device cpu         # a dry run without one; writes nothing
torchrun --nproc_per_node=2 -m parlab.distributed.gpu --parts ranks   # on several cards
"""

import argparse
import gc
import math
import os
import sys
import time
from contextlib import suppress

import torch

from parlab.distributed import torchrun
from parlab.distributed.gpu import record
from parlab.distributed.gpu.gauge import DEVICES
from parlab.distributed.gpu.machine import Machine, Skipped
from parlab.distributed.gpu.parts import PARTS
from parlab.gpu_prediction.cards import data_sheet_name
from parlab.gpu_prediction.rows import predicted_rows
from parlab.measurements import Row, read, show_rows

NO_CARD_BYTES = 10**15  # of the dry run, whose tensors have no data


def main(argv=None):
    """The program behind ``python -m parlab.distributed.gpu``; returns the exit code.

    0: every part ran or was skipped with its reason. 1: a part failed; the file is written all the
    same. 2: no card, or arguments that cannot be used.
    """
    argv = sys.argv[1:] if argv is None else argv
    options = _options(argv)
    if options.device == "cuda" and not torch.cuda.is_available():
        print(record.no_cuda_message(), file=sys.stderr)
        return 2
    if options.device == "cuda" and "RANK" in os.environ:
        if options.parts != ["ranks"]:
            print("under torchrun there is one part: --parts ranks", file=sys.stderr)
            return 2
        with torchrun.joined_ranks():
            return _measure(options, argv, first=int(os.environ["RANK"]) == 0)
    return _measure(options, argv)


def _measure(options, argv, first=True):
    on_card = options.device == "cuda"
    free, total = torch.cuda.mem_get_info() if on_card else (NO_CARD_BYTES, NO_CARD_BYTES)
    run = record.provenance(options.device, argv, free, total)
    sheet = data_sheet_name(run["card"])
    machine = Machine(options.device, free, sheet)
    say = print if first else _say_nothing
    say(f"{run['card']}: {free / 1e9:.1f} GB free, computing in {machine.compute}")
    if others := record.others_on_the_card(total - free, total):
        say(others)
    run |= {"configurations": {}, "rows": [], "skipped": {}, "texts": {}}
    failed = run_parts(machine, options.parts, run, say, 60 * options.minutes)
    if run["rows"]:
        read(run, where="this run", dry_run=not on_card)
    if not run["rows"]:
        say("nothing was measured, so nothing is written")
    elif first and options.out:
        print(f"written: {record.write(run, options.out)}")
    elif first:
        print("nothing is written without --out: a dry run is no measurement of a card")
    return 1 if failed else 0


def run_parts(machine, parts, run, say, seconds):
    """Run some parts one after the other and add to `run` what each gives; return the failed ones.

    A part that cannot run, or fails, is entered in run["skipped"] with its reason; others go on.
    """
    start, failed = time.monotonic(), []
    for name, function in PARTS.items():
        if name not in parts:
            run["skipped"][name] = "not asked for"
            continue
        if time.monotonic() - start > seconds:
            run["skipped"][name] = f"no time left: {seconds / 60:g} minutes were over"
            say(f"{name}: skipped, {run['skipped'][name]}")
            continue
        say(f"{name}: {(function.__doc__ or '').strip()}", flush=True)
        begun = time.monotonic()
        try:
            found = function(machine)
            rows = _rows(name, found)
        except (Skipped, MemoryError) as why:  # the card's memory, or the host's
            run["skipped"][name] = str(why)
        except torch.OutOfMemoryError as error:
            run["skipped"][name] = (
                f"ran out of memory: {_first_line(error)}; {machine.free_bytes / 1e9:.2f} GB were "
                "free at the start"
            )
        except Exception as error:  # a CUDA error is a RuntimeError of one kind or another
            run["skipped"][name] = f"failed: {type(error).__name__}: {_first_line(error)}"
            failed.append(name)
        else:
            run["configurations"][name] = found.configuration
            run["rows"] += [row.__dict__ for row in rows]
            run["texts"][name] = found.texts
            if say is print:
                show_rows(rows)
            for title, text in found.texts.items():
                say(f"{title}: {text}")
        if name in run["skipped"]:
            say(f"skipped: {run['skipped'][name]}")
        say(f"({time.monotonic() - begun:.1f} s)", flush=True)
        gc.collect()  # what a part has left on the card
        if machine.on_card:
            _empty_cache()
    return failed


def _rows(part, found):
    """The predicted rows with what was measured; both have the same items."""
    predicted = predicted_rows(part, found.configuration)
    if set(predicted) != set(found.measured):
        raise RuntimeError(f"items differ: {sorted(set(predicted) ^ set(found.measured))}")
    for item, measured in found.measured.items():
        if not math.isfinite(measured):
            raise RuntimeError(f"{item} came out as {measured}")
    return [
        Row(part, item, unit, value, found.measured[item])
        for item, (unit, value) in predicted.items()
    ]


def _empty_cache():
    with suppress(RuntimeError):  # after a CUDA error every call raises it once more
        torch.cuda.empty_cache()


def _first_line(error):
    return (str(error).strip().splitlines() or ["no message"])[0]


def _say_nothing(*_, **__):
    """The ranks behind the first one print nothing."""


def _options(argv):
    parser = argparse.ArgumentParser(
        prog="python -m parlab.distributed.gpu",
        description="Measure memory and times of a card beside their predictions.",
        epilog=f"Parts: {', '.join(PARTS)}.",
    )
    parser.add_argument("--device", choices=DEVICES, default="cuda", help="cpu: a dry run")
    parser.add_argument(
        "--parts",
        nargs="+",
        choices=PARTS,
        default=list(PARTS),
        metavar="PART",
        help="default: all",
    )
    parser.add_argument(
        "--out", metavar="FOLDER", help="where the file goes; default: measurements, on a card"
    )
    parser.add_argument(
        "--minutes", type=float, default=6, help="no part starts later than that (default: 6)"
    )
    options = parser.parse_args(argv)
    if not 0 < options.minutes < 1e4:
        parser.error(f"--minutes must be a number above 0, got {options.minutes}")
    if options.out is None and options.device == "cuda":
        options.out = "measurements"
    return options


if __name__ == "__main__":
    sys.exit(main())
