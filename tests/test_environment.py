"""One statement of what the course needs: pyproject.toml, with exact versions beside it."""

import json
import re
import tomllib
from importlib.metadata import metadata, requires

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from tools.setup_cell import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def constraint_lines():
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def pins():
    return {canonicalize_name(r.name): r for r in map(Requirement, constraint_lines())}


def needed(requirement, extras=("",), seen=None):
    """Return the names that installing ``requirement`` brings along, as the installed say."""
    seen = {} if seen is None else seen
    for child in map(Requirement, requires(requirement) or []):
        exact = any(part.operator == "==" for part in child.specifier)
        wanted = child.marker is None or any(child.marker.evaluate({"extra": e}) for e in extras)
        name = canonicalize_name(child.name)
        # What its parent names exactly, as torch its CUDA packages, needs no line of ours.
        if not wanted or (exact and requirement == "torch"):
            continue
        if (name, *sorted(child.extras)) not in seen:
            seen[(name, *sorted(child.extras))] = name
            needed(name, tuple(child.extras) or ("",), seen)
    return seen


@pytest.mark.parametrize("line", constraint_lines())
def test_a_constraint_is_an_exact_public_version(line):
    assert re.fullmatch(r"[A-Za-z0-9._-]+==[0-9][0-9A-Za-z.]*", line)


def test_everything_that_the_tests_install_is_pinned():
    names = set(needed("parlab", ("test",)).values()) - {"parlab"}
    assert {"numpy", "torch", "sphinx", "mdurl"} <= names  # direct and transitive ones are seen
    assert sorted(names - pins().keys()) == []


def test_every_pin_serves_the_first_python_that_the_course_promises():
    # Debian 12 has Python 3.11.2, and a package may ask for a later patch release.
    names = set(needed("parlab", ("test",)).values())
    asks = {name: metadata(name).get("Requires-Python") or "" for name in names}
    assert {name: ask for name, ask in asks.items() if "3.11.0" not in SpecifierSet(ask)} == {}


def test_the_package_itself_needs_numpy_only_and_pins_nothing():
    assert PROJECT["dependencies"] == ["numpy"]
    loose = PROJECT["optional-dependencies"]["torch"]
    assert pins()["torch"].specifier.contains("2.13.0")
    assert all("==" not in line and "<" not in line for line in loose)


def test_conda_installs_the_same_as_pip():
    conda = yaml.safe_load((ROOT / "environment.yml").read_text(encoding="utf-8"))
    python, pip, by_pip = conda["dependencies"]
    assert python == f"python{PROJECT['requires-python']}"
    assert pip == "pip"
    assert by_pip == {"pip": ["-c constraints.txt", "-e .[test]"]}


def test_hooks_use_the_pinned_versions():
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))
    hooks = [hook for repo in config["repos"] for hook in repo["hooks"]]
    lines = [line for hook in hooks for line in hook["additional_dependencies"]]
    assert lines
    for hook in map(Requirement, lines):
        assert pins()[canonicalize_name(hook.name)] == hook


def test_the_lock_file_of_npm_names_no_private_registry():
    lock = json.loads((ROOT / "package-lock.json").read_text(encoding="utf-8"))
    packages = [entry for name, entry in lock["packages"].items() if name]
    assert all(entry["integrity"].startswith("sha512-") for entry in packages)
    for entry in packages:
        address = entry.get("resolved", "https://registry.npmjs.org/")
        assert address.startswith("https://registry.npmjs.org/")


def test_the_citation_names_the_same_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == PROJECT["version"]
