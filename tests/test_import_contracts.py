"""The layers of the package, as pyproject.toml lists them, and a core that needs nothing else."""

import subprocess
import sys

import pytest

from tools.setup_cell import ROOT

CORE = [
    "parlab",
    "parlab.table",
    "parlab.totals",
    "parlab.units",
    "parlab.hardware",
    "parlab.published",
    "parlab.fit",
    "parlab.models",
    "parlab.config_file",
    "parlab.buckets",
    "parlab.memory.states",
    "parlab.memory.traffic",
    "parlab.memory.activations",
    "parlab.pipeline.timeline",
    "parlab.pipeline.zero_bubble",
    "parlab.pipeline.by_hand",
    "parlab.pipeline.grid",
    "parlab.pipeline.bubble",
    "parlab.pipeline.layers",
    "parlab.memory.step",
    "parlab.tensor_traffic",
    "parlab.expert_traffic",
    "parlab.context_traffic",
    "parlab.context_work",
    "parlab.collectives.schedules",
    "parlab.collectives.cost",
    "parlab.mesh",
    "parlab.planner.layout",
    "parlab.planner.estimate",
    "parlab.planner.search",
    "parlab.planner.reasons",
    "parlab.gpu_prediction.rows",
    "parlab.measurements",
    "parlab.svg",
    "parlab.panels",
    "parlab.cli.main",
    "parlab.whatif",  # not of the core, but it asks for widgets only when it shows one
]


def test_imports_keep_to_the_layers():
    command = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    run = subprocess.run(
        [sys.executable, "-c", command, "--no-cache", "--no-logo"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.parametrize("module", CORE)
def test_the_core_imports_without_any_installed_package(module):
    # -S leaves out site-packages, so this Python has what the reader's browser has.
    code = f"import sys; sys.path.insert(0, {str(ROOT / 'src')!r}); import {module}"
    subprocess.run([sys.executable, "-I", "-S", "-c", code], check=True)
