"""Run the notebooks as on Colab: ``python -m tools.colab [NOTEBOOK ...]``, all without names.

Colab opens a notebook in an empty folder, on an image with Jupyter packages of its own choice and
without parlab, which the set-up cell installs. Here the image is an environment with the versions
of tools/colab_pins.txt, and what the set-up cell installs is one wheel of this working tree, each
time anew. A row of the table is a notebook that was run; the exit code is 1 if one has a fault.
"""

import copy
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
import venv
from importlib.metadata import distribution, version
from pathlib import Path

import nbformat
from jupyter_client import AsyncKernelManager
from jupyter_client.kernelspec import KernelSpecManager
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from nbformat.v4 import new_code_cell, new_notebook

from tools.notebooks import WIDGET_VIEW
from tools.setup_cell import ROOT, repository_url, setup_cell

PINS = ROOT / "tools" / "colab_pins.txt"
ENVIRONMENT = ROOT / "build" / "colab"
# A chapter's first cell says so in one line: "**You need** a CPU. On Colab, any runtime will do."
RUNTIME = re.compile(r"^\*\*You need\*\* an? (CPU|GPU)\b.*\bOn Colab, [^.\n]*\bruntime\b", re.M)
# How ipywidgets 7.7 marks its models; those of ipywidgets 8 are 2.0.0.
WIDGETS_OF_COLAB = "1.5.0"
MOVE_EVERY_SLIDER = """\
from parlab import whatif
from parlab.panels import PANELS

for name in PANELS:
    *sliders, view = getattr(whatif, name)().sliders().children
    for slider in sliders:
        seen = set()
        for index in range(len(slider.options)):
            slider.index = index
            seen.add(view.value)
        one = len(slider.options) == 1
        assert one or len(seen) > 1, f"{name} looks the same wherever {slider.description} stands"
"""


def folder_of(environment, kind):
    """Return a folder of a virtual environment: kind is "scripts" or "purelib" (its packages)."""
    base = {"base": str(environment), "platbase": str(environment)}
    return Path(sysconfig.get_path(kind, "venv", base))


def link_torch(packages):
    """Link the torch of this environment, and nothing beside it, into the folder ``packages``.

    A path to the whole folder it lies in would lend the image all that lies there, in the versions
    of constraints.txt, and hide that the image lacks something.
    """
    torch = distribution("torch")
    for name in {file.parts[0] for file in torch.files} - {".."}:
        (packages / name).symlink_to(torch.locate_file(name))


def make_environment(environment=ENVIRONMENT, pins=PINS):
    """Make the image in the folder ``environment``, unless it is there with the same versions."""
    stamp = environment / "made_of.txt"
    made_of = f"{sys.version}\ntorch {version('torch')}\n{pins.read_text(encoding='utf-8')}"
    if stamp.exists() and stamp.read_text(encoding="utf-8") == made_of:
        return
    print(f"== making Colab's image in {environment}: a minute, 0.4 GB", flush=True)
    venv.create(environment, with_pip=True, clear=True)
    python = folder_of(environment, "scripts") / "python"
    subprocess.run([python, "-m", "pip", "install", "-q", "--no-deps", "-r", pins], check=True)
    packages = folder_of(environment, "purelib")
    link_torch(packages)
    # Colab's kernel has this module loaded, by which parlab.whatif knows where it is.
    (packages / "google" / "colab").mkdir(parents=True)
    (packages / "google" / "colab" / "__init__.py").touch()
    (packages / "google_colab.pth").write_text("import google.colab\n", encoding="utf-8")
    kernel = environment / "kernels" / "colab"
    kernel.mkdir(parents=True)
    command = [str(python), "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    spec = {"argv": command, "display_name": "Colab's image", "language": "python"}
    (kernel / "kernel.json").write_text(json.dumps(spec), encoding="utf-8")
    stamp.write_text(made_of, encoding="utf-8")


def build_wheel(folder):
    """Build the wheel of this working tree in ``folder`` and return its path."""
    # From a copy: setuptools would leave build/ behind here, and take what lies in an old one.
    source = folder / "source"
    shutil.copytree(ROOT / "src" / "parlab", source / "src" / "parlab")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "-w", folder, source], check=True)
    return next(folder.glob("*.whl"))


def variables(environment, wheel):
    """Return the environment variables of a kernel in the image, which finds parlab nowhere."""
    ours = {"PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "MPLBACKEND"}
    return {name: value for name, value in os.environ.items() if name not in ours} | {
        "PATH": os.pathsep.join([str(folder_of(environment, "scripts")), os.environ["PATH"]]),
        "IPYTHONDIR": str(environment / "ipython"),
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "PYDEVD_DISABLE_FILE_VALIDATION": "1",  # a kernel that old warns of frozen modules
        "PARLAB_SPEC": str(wheel),
    }


def execute(notebook, wheel, environment=ENVIRONMENT):
    """Run ``notebook`` in place as Colab would, and return what stopped it, or None.

    The state of its widgets is left in the notebook's metadata.
    """
    python = folder_of(environment, "scripts") / "python"
    uninstall = [python, "-m", "pip", "uninstall", "-qq", "-y", "parlab"]
    # Where PYTHONPATH named our src, pip would find parlab there, and leave the image's alone.
    subprocess.run(uninstall, check=True, env=variables(environment, wheel))
    kernels = KernelSpecManager(kernel_dirs=[str(environment / "kernels")])
    manager = AsyncKernelManager(kernel_name="colab", kernel_spec_manager=kernels)
    with tempfile.TemporaryDirectory() as empty:
        where = {"metadata": {"path": empty}}
        client = NotebookClient(
            notebook, km=manager, timeout=600, resources=where, coalesce_streams=True
        )
        try:
            client.execute(cleanup_kc=True, env=variables(environment, wheel))
        except CellExecutionError as error:
            return f"{error.ename}: {error.evalue}"
        except (CellTimeoutError, DeadKernelError) as error:
            return str(error)
    return None


def is_panel(output):
    return 'class="parlab-panel"' in output.get("data", {}).get("text/html", "")


def printed(cell):
    """Return all that the cell wrote, to standard output (stdout) or as a warning (stderr)."""
    return "".join(o.text for o in cell.outputs if o.output_type == "stream")


def faults(stored, ran):
    """Return what differs between a notebook as stored and as run, one line a cell.

    A panel has to be a view of ipywidgets 7.7, and a cell has to print what it printed, unless the
    tests leave out its output too.
    """
    widgets = ran.metadata.get("widgets", {}).get("application/vnd.jupyter.widget-state+json", {})
    found = []
    for number, (before, after) in enumerate(zip(stored.cells, ran.cells, strict=True)):
        if before.cell_type != "code" or before.source == setup_cell(repository_url()):
            continue
        views = [o.data[WIDGET_VIEW] for o in after.outputs if WIDGET_VIEW in o.get("data", {})]
        models = [widgets.get("state", {}).get(view["model_id"], {}) for view in views]
        versions = [model.get("model_module_version") for model in models]
        if any(map(is_panel, before.outputs)) and versions != [WIDGETS_OF_COLAB]:
            found.append(f"cell {number}: one panel expected, views of widgets: {versions}")
        tags = before.metadata.get("tags", [])
        varies = "nbval-ignore-output" in tags or "# NBVAL_IGNORE_OUTPUT" in before.source
        if not varies and printed(after) != printed(before):
            found.append(f"cell {number} printed {printed(after)!r}, not {printed(before)!r}")
    return found


def needs_gpu(notebook):
    """Whether the notebook's first cell says that it needs a GPU."""
    stated = RUNTIME.search(notebook.cells[0].source)
    return stated is not None and stated[1] == "GPU"


def check(name, stored, wheel):
    """Run one notebook, print its row, and return how many faults it has."""
    print(f"{name:32}", end="", flush=True)
    if needs_gpu(stored):
        print(f"{'':7}  needs a GPU, not run")
        return 0
    ran = copy.deepcopy(stored)
    for cell in ran.cells:
        if cell.cell_type == "code":
            cell.outputs = []
    start = time.perf_counter()
    stopped = execute(ran, wheel)
    found = [f"stopped: {stopped}"] if stopped else faults(stored, ran)
    print(f"{time.perf_counter() - start:7.0f}  {'FAULTY' if found else 'as stored'}")
    for line in found:
        print(f"    {line}")
    return len(found)


def main(paths):
    make_environment()
    with tempfile.TemporaryDirectory() as folder:
        wheel = build_wheel(Path(folder))
        print(f"{'notebook':32}seconds  outputs")
        total = 0
        for path in map(Path, paths or sorted((ROOT / "notebooks").glob("*.ipynb"))):
            total += check(path.stem, nbformat.read(path, as_version=4), wheel)
        cells = [new_code_cell(s) for s in (setup_cell(repository_url()), MOVE_EVERY_SLIDER)]
        total += check("every slider of every panel", new_notebook(cells=cells), wheel)
    return total


if __name__ == "__main__":
    sys.exit(1 if main(sys.argv[1:]) else 0)
