"""Set the address of the repository everywhere: ``python -m tools.repository URL``.

Until this is done once, the course names a placeholder. The address stands in the metadata, in the
book's configuration (its Colab and issue buttons), in the texts and in the notebooks' set-up cells.
"""

import re
import sys
from pathlib import Path

from tools.notebooks import replace_text
from tools.setup_cell import ROOT, repository_url

FILES = ("pyproject.toml", "CITATION.cff", "*.md", "book/*.yml", "book/*.md", "notebooks/*.ipynb")
# A user or organisation of GitHub has letters, digits and inner hyphens; Colab opens no other host.
ADDRESS = re.compile(r"https://github\.com/[A-Za-z0-9]+(-[A-Za-z0-9]+)*/[A-Za-z0-9._-]+")


def check(url):
    """Raise ValueError unless ``url`` is the plain address of a repository on GitHub."""
    if not ADDRESS.fullmatch(url) or url.endswith((".git", ".")):
        raise ValueError(
            f"URL is {url!r}, but it must read https://github.com/OWNER/NAME, without .git or a "
            "slash at the end: the book's buttons and the set-up cells add to it"
        )


def set_url(url, root=ROOT):
    """Replace the present address by ``url`` in every file that names it; return those files."""
    check(url)
    present = re.compile(re.escape(repository_url(root)) + r"(?![\w-])")
    changed = {}
    for pattern in FILES:
        for path in sorted(root.glob(pattern)):
            old = path.read_text(encoding="utf-8")
            new = present.sub(url, old)
            if new != old:
                changed[path] = new
    for path, text in changed.items():
        replace_text(path, text)
    return list(changed)


if __name__ == "__main__":
    try:
        for name in set_url(sys.argv[1] if len(sys.argv) > 1 else ""):
            print(f"set in {Path(name).relative_to(ROOT)}")
    except ValueError as error:
        sys.exit(str(error))
