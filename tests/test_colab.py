"""The parts of ``make colab``; the whole runs every notebook and is a job of its own."""

import re
import sysconfig
import tomllib
import zipfile
from importlib.metadata import requires
from pathlib import Path

import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tools import colab
from tools.notebooks import WIDGET_VIEW
from tools.setup_cell import ROOT, repository_url, setup_cell

PANEL = new_output("execute_result", data={"text/html": '<div class="parlab-panel">...</div>'})


def pins():
    lines = colab.PINS.read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def pinned():
    return {canonicalize_name(Requirement(line).name) for line in pins()}


@pytest.mark.parametrize("line", pins())
def test_a_pin_is_an_exact_public_version(line):
    assert re.fullmatch(r"[A-Za-z0-9._-]+==[0-9][0-9A-Za-z.]*", line)


@pytest.mark.parametrize(
    "name, release",
    [
        ("numpy", "2.1"),
        ("matplotlib", "3.10"),
        ("ipywidgets", "7.7.1"),
        ("ipython", "7.34"),
        ("ipykernel", "6.17"),
    ],
)
def test_the_pins_are_the_image_of_august_2026(name, release):
    (pin,) = [line for line in pins() if line.startswith(f"{name}==")]
    assert f"{pin}.".startswith(f"{name}=={release}.")


def test_all_that_parlab_and_torch_ask_for_is_in_the_image():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    ours = project["dependencies"] + extras["torch"] + extras["plots"] + extras["widgets"]
    names = {
        canonicalize_name(r.name)
        for r in map(Requirement, ours + requires("torch"))
        if (r.marker is None or r.marker.evaluate({"extra": ""}))
        # torch names its CUDA packages exactly, and finds them beside itself through its link.
        and not any(part.operator == "==" for part in r.specifier)
    }
    assert {"numpy", "matplotlib", "ipywidgets", "cloudpickle", "sympy"} <= names
    assert sorted(names - pinned() - {"torch"}) == []


def test_torch_is_linked_and_nothing_beside_it(tmp_path):
    colab.link_torch(tmp_path)
    names = {path.name for path in tmp_path.iterdir()}
    assert names >= {"torch", "torchgen"}
    assert {name.split("-")[0] for name in names} <= {"torch", "torchgen", "functorch"}
    assert (tmp_path / "torch" / "__init__.py").is_file()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    return colab.build_wheel(tmp_path_factory.mktemp("wheel"))


def test_the_wheel_holds_the_package_with_its_data(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    sources = [
        p for p in (ROOT / "src" / "parlab").rglob("*") if p.suffix in (".py", ".toml", ".json")
    ]
    expected = {path.relative_to(ROOT / "src").as_posix() for path in sources}
    assert {name for name in names if ".dist-info/" not in name} == expected


@pytest.mark.parametrize(
    "words, gpu",
    [
        ("**You need** a CPU. On Colab, any runtime will do. It runs in a minute.", False),
        ("# Title\n\n**You need** a GPU. On Colab, choose a T4 runtime.\n\nMore.", True),
        ("**You need** a CPU and, for the live cells, a GPU. On Colab, take a T4 runtime.", False),
        ("A GPU has memory. You need it.", False),
    ],
)
def test_a_notebook_says_in_its_first_cell_whether_it_needs_a_gpu(words, gpu):
    assert colab.needs_gpu(new_notebook(cells=[new_markdown_cell(words)])) is gpu


def cell(*outputs, source="1", tags=()):
    return new_code_cell(source, outputs=list(outputs), metadata={"tags": list(tags)})


def says(text, name="stdout"):
    return new_output("stream", name=name, text=text)


def view(model="box"):
    return new_output("display_data", data={WIDGET_VIEW: {"model_id": model}})


def ran(code_cell, module_version="1.5.0"):
    state = {"box": {"model_module_version": module_version}}
    kind = "application/vnd.jupyter.widget-state+json"
    return new_notebook(cells=[code_cell], metadata={"widgets": {kind: {"state": state}}})


def found(before, after, **versions):
    return colab.faults(new_notebook(cells=[before]), ran(after, **versions))


def test_a_cell_has_to_print_what_it_printed():
    assert found(cell(says("1\n")), cell(says("1\n"))) == []
    (fault,) = found(cell(says("1\n")), cell(says("2\n")))
    assert "cell 0" in fault and repr("2\n") in fault and repr("1\n") in fault


def test_a_warning_that_is_not_stored_is_a_fault():
    after = cell(says("1\n"), says("DeprecationWarning", "stderr"))
    assert "DeprecationWarning" in found(cell(says("1\n")), after)[0]


def test_an_output_that_the_tests_leave_out_is_left_out_here():
    tagged = cell(says("1.2 ms"), tags=["nbval-ignore-output"])
    marked = cell(says("1.2 ms"), source="# NBVAL_IGNORE_OUTPUT\nwork()")
    for before in (tagged, marked):
        assert found(before, cell(says("1.3 ms"))) == []


def test_what_pip_says_in_the_set_up_cell_is_no_fault():
    source = setup_cell(repository_url())
    assert found(cell(source=source), cell(says("Note: restart"), source=source)) == []


def test_a_panel_has_to_be_a_view_of_the_image_s_widgets():
    assert found(cell(PANEL), cell(view())) == []
    assert "2.0.0" in found(cell(PANEL), cell(view()), module_version="2.0.0")[0]
    assert "expected" in found(cell(PANEL), cell(PANEL))[0]
    assert "expected" in found(cell(PANEL), cell(view("a model that never was")))[0]


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory):
    """An image without its versions: what this environment has, except parlab and pip."""
    environment = tmp_path_factory.mktemp("image")
    no_pins = environment.parent / "no_pins.txt"
    no_pins.touch()
    colab.make_environment(environment, no_pins)
    packages = colab.folder_of(environment, "purelib")
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        ours = re.search(r"parlab|editable|^pip\b", path.name)
        if not ours and not (packages / path.name).exists():
            (packages / path.name).symlink_to(path)
    return environment


def test_a_notebook_starts_in_an_empty_folder_without_parlab_and_installs_the_wheel(
    stand_in, wheel, monkeypatch
):
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))
    look = "import importlib.util, os\nprint(os.listdir(), importlib.util.find_spec('parlab'))"
    panel = "from parlab import whatif\nprint(whatif.__file__)\nwhatif.bytes_per_rank()"
    cells = [new_code_cell(source) for source in (look, setup_cell(repository_url()), panel)]
    assert colab.execute(new_notebook(cells=cells), wheel, stand_in) is None
    assert colab.printed(cells[0]) == "[] None\n"
    assert colab.printed(cells[2]).startswith(str(stand_in))
    # On Colab the sliders alone: with the still beside them it could choose the still.
    assert set(cells[2].outputs[-1].data) == {"text/plain", WIDGET_VIEW}
    # The next notebook must not find what this one has installed.
    again = new_code_cell(look)
    assert colab.execute(new_notebook(cells=[again]), wheel, stand_in) is None
    assert colab.printed(again) == "[] None\n"


def test_a_cell_that_fails_stops_the_notebook_by_name(stand_in, wheel):
    notebook = new_notebook(cells=[new_code_cell("1 / 0"), new_code_cell("print('later')")])
    assert colab.execute(notebook, wheel, stand_in) == "ZeroDivisionError: division by zero"
    assert notebook.cells[1].outputs == []


def test_the_same_versions_are_not_installed_twice(stand_in, capsys):
    colab.make_environment(stand_in, stand_in.parent / "no_pins.txt")
    assert capsys.readouterr().out == ""


def test_a_row_names_the_faults_and_a_notebook_for_a_gpu_is_not_run(monkeypatch, capsys):
    def execute(notebook, wheel):
        notebook.cells[1].outputs = [says("2\n")]

    monkeypatch.setattr(colab, "execute", execute)
    needs = new_markdown_cell("**You need** a CPU. On Colab, any runtime will do.")
    stored = new_notebook(cells=[needs, cell(says("1\n"))])
    assert colab.check("a_chapter", stored, "parlab.whl") == 1
    assert re.search(r"^a_chapter +0  FAULTY\n    cell 1 printed '2", capsys.readouterr().out)
    assert colab.printed(stored.cells[1]) == "1\n"
    needs.source = needs.source.replace("a CPU", "a GPU")
    assert colab.check("a_chapter", stored, "parlab.whl") == 0
    assert "needs a GPU, not run" in capsys.readouterr().out


def test_a_notebook_that_stops_is_a_fault(monkeypatch, capsys):
    monkeypatch.setattr(colab, "execute", lambda notebook, wheel: "ValueError: no")
    assert colab.check("a_chapter", new_notebook(cells=[cell()]), "parlab.whl") == 1
    assert "stopped: ValueError: no" in capsys.readouterr().out
