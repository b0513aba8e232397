"""Run notebooks and store them in one normal form: ``python -m tools.notebooks FILE ...``.

A notebook on disk is replaced in one step after its last cell, so that a run which fails or is
killed leaves the old file whole. The normal form keeps outputs and drops what differs between two
runs or two machines, which keeps a change to a chapter readable as a diff.
"""

import contextlib
import os
import sys
import tempfile
import time
from pathlib import Path

import nbformat

METADATA = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
# Written by front ends and by nbclient; a cell's tags and everything else stay.
CELL_METADATA_OF_A_RUN = ("ExecuteTime", "collapsed", "execution", "scrolled")
# Names a widget of a kernel that is gone; the page shows the HTML beside it instead.
WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"


def run(notebook, folder):
    """Execute all cells of ``notebook`` in place, in a new kernel working in ``folder``."""
    from nbclient import NotebookClient

    client = NotebookClient(
        notebook,
        timeout=600,
        kernel_name="python3",
        resources={"metadata": {"path": str(folder)}},
        coalesce_streams=True,  # otherwise printed text is cut where the kernel happened to flush
        record_timing=False,
        store_widget_state=False,
    )
    client.execute()


def normalise(notebook):
    """Bring ``notebook`` in place into the form in which the repository stores it."""
    notebook.metadata = nbformat.from_dict(METADATA)
    for number, cell in enumerate(notebook.cells):
        cell.id = str(number)
        for key in CELL_METADATA_OF_A_RUN:
            cell.metadata.pop(key, None)
        for output in cell.get("outputs", []):
            if len(output.get("data", {})) > 1:
                output.data.pop(WIDGET_VIEW, None)


def replace_text(path, text):
    """Replace the file at ``path`` in one step: readers see the old text or the new, whole."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8", newline="\n") as file:
            file.write(text)
        # mkstemp makes a private file; the new one is as readable as the old.
        os.chmod(temporary, path.stat().st_mode)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.remove(temporary)
        raise


def as_text(notebook):
    return nbformat.writes(notebook) + "\n"


def refresh(path):
    """Run the notebook at ``path`` and store it in normal form."""
    notebook = nbformat.read(path, as_version=4)
    run(notebook, path.parent)
    normalise(notebook)
    nbformat.validate(notebook)
    replace_text(path, as_text(notebook))


def main(paths):
    for path in map(Path, paths):
        start = time.perf_counter()
        print(f"running {path} ...", end=" ", flush=True)
        refresh(path)
        print(f"{time.perf_counter() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
