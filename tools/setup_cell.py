"""The first code cell of every notebook: it installs parlab where it is missing, as on Colab."""

import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PLACEHOLDER = "https://github.com/_owner_/parlab"

SOURCE = """\
try:
    import parlab
except ImportError:
    import os

    spec = os.environ.get("PARLAB_SPEC", "git+{url}")
    if "_owner_" in spec:
        print("Set PARLAB_SPEC to what pip should install: a wheel or a folder of the course.")
    else:
        %pip install -q "{{spec}}"
"""


def repository_url(root=ROOT):
    """Return the address of the repository that pyproject.toml states, the placeholder if unset."""
    pyproject = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    return pyproject["project"]["urls"]["Repository"]


def setup_cell(url):
    """Return the source of the set-up cell for a repository, as a notebook stores it."""
    return SOURCE.format(url=url).rstrip("\n")
