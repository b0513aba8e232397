"""Collect what the built book serves itself, so that a page asks no other host for anything.

Copies Python for the browser (Pyodide) and MathJax out of node_modules and zips the package:

    python tools/site.py book/_static/vendor
"""

import shutil
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NODE_MODULES = ROOT / "node_modules"
PYODIDE = (
    "pyodide.mjs",
    "pyodide.asm.mjs",
    "pyodide.asm.wasm",
    "pyodide-lock.json",
    "python_stdlib.zip",
)
NOT_BEHIND_PANELS = ("accuracy", "cli", "distributed", "exercises", "ledger")
MATHJAX = ("tex-mml-chtml.js", "output/chtml/fonts/woff-v2")


def copy(source: Path, target: Path) -> None:
    """Copy a file or a folder; a clear end where npm has not installed it."""
    if not source.exists():
        sys.exit(f"{source} is missing: run `npm ci` in {ROOT} first")
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        shutil.copytree(source, target)
    else:
        shutil.copyfile(source, target)


def zip_package(target: Path) -> None:
    """Zip what panels may need of src/parlab, with fixed times: equal sources give equal bytes."""
    package = ROOT / "src" / "parlab"
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted(package.rglob("*")):
            part = path.relative_to(package).parts[0]
            if path.suffix in (".py", ".toml") and part not in NOT_BEHIND_PANELS:
                entry = zipfile.ZipInfo(path.relative_to(package.parent).as_posix())
                archive.writestr(entry, path.read_bytes(), zipfile.ZIP_DEFLATED)


def collect(output: Path) -> None:
    """Fill `output` afresh."""
    shutil.rmtree(output, ignore_errors=True)
    for name in PYODIDE:
        copy(NODE_MODULES / "pyodide" / name, output / "pyodide" / name)
    for name in MATHJAX:
        copy(NODE_MODULES / "mathjax" / "es5" / name, output / "mathjax" / name)
    zip_package(output / "parlab.zip")
    size = sum(path.stat().st_size for path in output.rglob("*") if path.is_file())
    print(f"{output}: {size / 1e6:.1f} MB")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python tools/site.py OUTPUT_DIR")
    collect(Path(sys.argv[1]))
