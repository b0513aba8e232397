"""Provenance of a run, and a file that is there whole or not at all."""

import json
import os
import platform
import re
import shlex
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

import numpy
import torch

import parlab
from parlab.measurements import COMMIT, SCHEMA


def provenance(gauge_kind, argv, free_bytes, card_bytes):
    """Everything in a file but its parts: what ran, when, on what.

    gauge_kind: "cuda" or "cpu". argv: the program's arguments. free_bytes, card_bytes: of the card
    before anything ran.
    """
    on_card = gauge_kind == "cuda"
    return {
        "schema": SCHEMA,
        "command": shlex.join(["python", "-m", "parlab.distributed.gpu", *argv]),
        "commit": commit(),
        "parlab": metadata_version(),
        "utc": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "device": gauge_kind,
        "card": torch.cuda.get_device_name() if on_card else "none (dry run)",
        "card_bytes": card_bytes,
        "free_bytes": free_bytes,
        "driver": (nvidia_smi("--query-gpu=driver_version") or "unknown") if on_card else "none",
        "cuda": torch.version.cuda or "none",
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "python": platform.python_version(),
        "system": platform.platform(),
    }


def commit():
    """The commit that this package's source was checked out from, or "unknown".

    Where the source was copied without its history, the variable PARLAB_COMMIT may say it.
    Raises ValueError where that is no commit.
    """
    if stated := os.environ.get("PARLAB_COMMIT"):
        if not COMMIT.fullmatch(stated):
            raise ValueError(f"PARLAB_COMMIT must be a commit's 40 hex digits, got {stated!r}")
        return stated
    folder = Path(parlab.__file__).parent
    for arguments in (
        ("ls-files", "--error-unmatch", "__init__.py"),  # not some repository around site-packages
        ("describe", "--always", "--abbrev=40", "--dirty", "--exclude=*"),
    ):
        output = _output(["git", "-C", str(folder), *arguments])
        if output is None:
            return "unknown"
    return output


def metadata_version():
    """parlab's own version, or "unknown" if it was not installed."""
    try:
        return metadata.version("parlab")
    except metadata.PackageNotFoundError:
        return "unknown"


def nvidia_smi(query):
    """What nvidia-smi answers to a query, its first line; None where it is missing."""
    output = _output(["nvidia-smi", query, "--format=csv,noheader"])
    return output.splitlines()[0].strip() if output else None


def others_on_the_card(used_bytes, total_bytes):
    """Say who else holds memory of the card, "" if nobody holds a tenth, and more than 1 GB of it.

    This process's own context takes up to that much.
    """
    if used_bytes < max(total_bytes / 10, 1e9):
        return ""
    who = _output(["nvidia-smi", "--query-compute-apps=pid,process_name", "--format=csv,noheader"])
    named = "; ".join((who or "").splitlines()) or "nvidia-smi does not say which"
    return (
        f"other processes hold {used_bytes / 1e9:.1f} GB of the card's {total_bytes / 1e9:.1f} GB "
        f"({named}): parts take smaller sizes or are skipped; end those processes for full ones"
    )


def file_name(record):
    """<card>-<UTC>.json, in letters that every file system takes."""
    card = re.sub(r"[^a-z0-9]+", "-", record["card"].lower()).strip("-")
    return f"{card}-{record['utc'].replace(':', '').replace('-', '')}.json"


def write(record, folder):
    """Write a record into a folder, and return its path; a kill leaves no file with that name."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(record, indent=1, allow_nan=False) + "\n"
    path = folder / file_name(record)
    handle, temporary = tempfile.mkstemp(dir=folder, prefix=".", suffix=".part")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
    return path


def _output(command):
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return run.stdout.strip() if run.returncode == 0 else None


def no_cuda_message():
    """What to do where there is no card."""
    built = torch.version.cuda
    why = (
        f"this torch ({torch.__version__}) was built without CUDA: install a CUDA build from "
        "https://pytorch.org/get-started/locally"
        if built is None
        else "torch sees no card: on Colab choose Runtime > Change runtime type > GPU; elsewhere "
        "see whether nvidia-smi lists one"
    )
    return (
        f"no CUDA card: {why}. For a dry run of the same program without a card: "
        f"{Path(sys.executable).name} -m parlab.distributed.gpu --device cpu"
    )
