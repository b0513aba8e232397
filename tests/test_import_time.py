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
