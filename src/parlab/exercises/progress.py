"""What a reader has done, kept in a small file beside their work and sent nowhere."""

import json
import os
from contextlib import suppress
from pathlib import Path

from parlab.exercises.catalogue import EXERCISES
from parlab.exercises.question_bank import QUESTIONS

FILE = ".parlab_progress.json"
KINDS = {"exercises": EXERCISES, "questions": QUESTIONS}


def progress(folder="."):
    """Print which exercises are solved and which questions answered, chapter by chapter.

    folder: where the checks were run; they write `.parlab_progress.json` there, as
    `pytest exercises` does in its own folder. Deleting the file starts anew.
    """
    done, unreadable = _read(Path(folder))
    chapters = {entry.chapter for entries in KINDS.values() for entry in entries.values()}
    for chapter in sorted(chapters):
        lines, counts = [], []
        for kind, entries in KINDS.items():
            here = [name for name, entry in entries.items() if entry.chapter == chapter]
            solved = sum(name in done[kind] for name in here)
            counts.append(f"{solved} of {len(here)} {kind}")
            lines += [f"    {'x' if name in done[kind] else '.'} {name}" for name in here]
        print(f"Chapter {chapter}: {', '.join(counts)}")
        print("\n".join(lines))
    if unreadable:
        print(f"{FILE} in this folder cannot be read; the next pass replaces it.")


def note_done(kind, name, folder="."):
    """Remember one solved exercise or answered question; where nothing can be written, go on."""
    folder = Path(folder)
    done, _ = _read(folder)
    if name in done[kind]:
        return
    done[kind].append(name)
    with suppress(OSError):
        new = folder / (FILE + ".new")
        new.write_text(json.dumps(done, indent=1) + "\n", encoding="utf-8")
        os.replace(new, folder / FILE)


def _read(folder):
    """Return {kind: names}, and whether there is a file that is none of ours."""
    path = folder / FILE
    if not path.exists():
        return {kind: [] for kind in KINDS}, False
    try:
        known = json.loads(path.read_text(encoding="utf-8"))
        return {kind: [str(name) for name in known[kind]] for kind in KINDS}, False
    except (OSError, ValueError, KeyError, TypeError):
        return {kind: [] for kind in KINDS}, True
