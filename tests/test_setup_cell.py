"""The set-up cell on a machine without parlab: an empty folder, a fresh environment, a wheel."""

import os
import shutil
import subprocess
import sys
import sysconfig
import venv

import pytest

from tools.setup_cell import PLACEHOLDER, ROOT, setup_cell

# Not the installed version, so that pip has something to install.
VERSION = "0.0.0.dev0"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    source = tmp_path_factory.mktemp("a source")
    for name in ("README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "src" / "parlab", source / "src" / "parlab")
    lines = (ROOT / "pyproject.toml").read_text(encoding="utf-8").splitlines(keepends=True)
    lines = [f'version = "{VERSION}"\n' if li.startswith("version = ") else li for li in lines]
    (source / "pyproject.toml").write_text("".join(lines), encoding="utf-8")
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "-w", str(source), str(source)], check=True)
    return next(source.glob("*.whl"))


@pytest.fixture(scope="module")
def bare_python(tmp_path_factory):
    """A Python with pip, and with the packages of this environment except parlab."""
    folder = tmp_path_factory.mktemp("bare")
    venv.create(folder, with_pip=True)
    place = "Scripts" if os.name == "nt" else "bin"
    python = folder / place / ("python.exe" if os.name == "nt" else "python")
    query = "import sysconfig; print(sysconfig.get_path('purelib'))"
    there = subprocess.check_output([python, "-c", query], text=True).strip()
    # A plain path line: the links of editable installs behind it are not followed, so parlab is
    # missing although everything else is there, without fetching anything.
    with open(os.path.join(there, "packages.pth"), "w", encoding="utf-8") as link:
        link.write(sysconfig.get_path("purelib") + "\n")
    return python


def run_cell(python, folder, source, **environment):
    script = folder / "cell.ipy"
    script.write_text(source, encoding="utf-8")
    return subprocess.run(
        [python, "-m", "IPython", "--quick", "--colors=NoColor", str(script)],
        cwd=folder,
        env={**os.environ, "IPYTHONDIR": str(folder / "profile"), **environment},
        capture_output=True,
        text=True,
    )


def test_it_prints_nothing_where_parlab_is_installed(tmp_path):
    run = run_cell(sys.executable, tmp_path, setup_cell(PLACEHOLDER))
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")


def test_it_says_what_to_do_while_the_repository_is_unset(bare_python, tmp_path):
    run = run_cell(bare_python, tmp_path, setup_cell(PLACEHOLDER), PARLAB_SPEC=PLACEHOLDER)
    assert "Set PARLAB_SPEC" in run.stdout
    assert run.returncode == 0


def test_it_installs_what_the_variable_names(bare_python, wheel, tmp_path):
    source = setup_cell(PLACEHOLDER) + (
        "\nimport parlab\nfrom importlib.metadata import version\n"
        "from parlab import hardware\n"
        "print('installed', version('parlab'), hardware.link('nvlink-4').name)\n"
    )
    run = run_cell(bare_python, tmp_path, source, PARLAB_SPEC=str(wheel))
    assert f"installed {VERSION}" in run.stdout, run.stdout + run.stderr
