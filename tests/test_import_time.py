"""``import parlab`` stays light; how many milliseconds it takes is printed by ``make bench``."""

import json
import subprocess
import sys

import pytest


@pytest.fixture(scope="module")
def loaded():
    code = (
        "import sys; before = set(sys.modules); import parlab, json;"
        "print(json.dumps(sorted(set(sys.modules) - before)))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return json.loads(run.stdout)


@pytest.mark.parametrize("package", ["numpy", "torch", "matplotlib", "ipywidgets", "dataclasses"])
def test_import_loads_no_heavy_package(loaded, package):
    assert package not in loaded


def test_import_loads_no_module_of_parlab_but_the_lazy_names(loaded):
    ours = [name for name in loaded if name.split(".")[0] == "parlab"]
    assert ours == ["parlab", "parlab._lazy"]


@pytest.mark.parametrize(
    "use, answer",
    [
        ("pl.all_reduce_cost(8, 14e9, pl.link('nvlink-4')).bytes_per_rank", "24500000000.0"),
        ("pl.format_bytes(pl.padded_elements(8, 6))", "12 B"),
        ("len(pl.ring_all_reduce_schedule(8).steps)", "14"),
    ],
    ids=["cost", "units", "schedule"],
)
def test_without_numpy_and_torch_the_core_still_answers(use, answer):
    # A reader in a browser has neither.
    hidden = "import sys; sys.modules |= dict.fromkeys(('numpy', 'torch'))"
    code = f"{hidden}; import parlab as pl; print({use})"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == answer
