"""The address of the repository is the same everywhere and is set by one command."""

import re
import shutil

import nbformat
import pytest
import yaml

from tools.repository import FILES, set_url
from tools.setup_cell import PLACEHOLDER, ROOT, repository_url, setup_cell


@pytest.fixture
def copy(tmp_path):
    for pattern in FILES:
        for path in ROOT.glob(pattern):
            target = tmp_path / path.relative_to(ROOT)
            target.parent.mkdir(exist_ok=True)
            shutil.copy(path, target)
    return tmp_path


def addresses(root):
    """Return the address as each place states it, read the way its user reads it."""
    config = yaml.safe_load((root / "book" / "_config.yml").read_text(encoding="utf-8"))
    citation = yaml.safe_load((root / "CITATION.cff").read_text(encoding="utf-8"))
    readme = (root / "README.md").read_text(encoding="utf-8")
    found = {
        "pyproject.toml": repository_url(root),
        "_config.yml": config["repository"]["url"],
        "CITATION.cff": citation["repository-code"],
        "README.md": re.search(r"git clone (\S+)", readme)[1],
    }
    for path in (root / "notebooks").glob("*.ipynb"):
        cells = nbformat.read(path, as_version=4).cells
        source = next(cell.source for cell in cells if cell.cell_type == "code")
        found[path.name] = re.search(r'git\+([^"\s]+)"', source)[1]
    return found


def test_every_place_states_the_same_address():
    assert set(addresses(ROOT).values()) == {repository_url()}


def test_one_command_sets_it_everywhere(copy):
    new = "https://github.com/some-school/parlab-course"
    set_url(new, copy)
    assert set(addresses(copy).values()) == {new}
    for pattern in FILES:
        for path in copy.glob(pattern):
            assert f"{repository_url()}\n" not in path.read_text(encoding="utf-8")
            assert f'{repository_url()}"' not in path.read_text(encoding="utf-8")


def test_the_set_up_cell_stays_the_one_of_the_tests(copy):
    new = "https://github.com/some-school/parlab"
    set_url(new, copy)
    for path in (copy / "notebooks").glob("*.ipynb"):
        cells = nbformat.read(path, as_version=4).cells
        assert next(c.source for c in cells if c.cell_type == "code") == setup_cell(new)


def test_it_can_be_changed_again_and_setting_it_twice_changes_nothing(copy):
    set_url("https://github.com/a/parlab", copy)
    set_url("https://github.com/a/parlab-two", copy)
    assert set_url("https://github.com/a/parlab-two", copy) == []
    assert set(addresses(copy).values()) == {"https://github.com/a/parlab-two"}


@pytest.mark.parametrize(
    "url",
    [
        "",
        PLACEHOLDER,
        "github.com/a/parlab",
        "http://github.com/a/parlab",
        "https://gitlab.com/a/parlab",
        "https://github.com/a/parlab/",
        "https://github.com/a/parlab.git",
        "https://github.com/a",
        "https://github.com/a/parlab/tree/main",
        'https://github.com/a/par"lab',
        "https://github.com/a/parlab\n",
    ],
)
def test_an_address_of_another_form_is_refused_and_changes_nothing(copy, url):
    before = addresses(copy)
    with pytest.raises(ValueError, match="OWNER/NAME"):
        set_url(url, copy)
    assert addresses(copy) == before
