"""The layers of the package, as pyproject.toml lists them, and a core that needs nothing else."""

import ast
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


SOURCES = sorted((ROOT / "src").rglob("*.py"))


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_a_choice_that_was_checked_is_not_read_as_it_was_written(path):
    """`require_choice` ignores case: "Full" must not go on as "Full", which equals no choice."""
    for function in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(function, ast.FunctionDef) and function.name != "require_choice":
            for statement in ast.walk(function):
                for call in choices_in(statement):
                    is_dropped = isinstance(statement, ast.Expr) and statement.value is call
                    assert not is_dropped, f"line {call.lineno} drops it"
                    late = [] if replaces(statement, call) else list(reads_after(function, call))
                    assert not late, f"line {late[0].lineno} reads what line {call.lineno} checked"


def choices_in(statement):
    """Calls of require_choice in a statement that has no others inside."""
    if isinstance(statement, ast.Assign | ast.Expr | ast.Return | ast.Assert):
        for node in ast.walk(statement):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "require_choice":
                yield node


def replaces(statement, call):
    """Whether what was checked is assigned anew, or cannot be read any more."""
    if isinstance(statement, ast.Return):
        return True
    checked = getattr(call.args[1], "id", None)
    targets = [n.id for t in getattr(statement, "targets", []) for n in ast.walk(t) if is_name(n)]
    return checked is None or checked in targets


def reads_after(function, call):
    for node in ast.walk(function):
        if is_name(node) and node.id == call.args[1].id and node.lineno > call.lineno:
            yield node


def is_name(node):
    return isinstance(node, ast.Name)
