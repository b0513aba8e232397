"""What concerns the whole run: the book is built once, and a run without a browser says so."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent


@pytest.fixture(scope="session")
def book_site(pytestconfig):
    """The folder of the book, built once a run, from nothing and with warnings as errors."""
    capture = pytestconfig.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():
        print()
        subprocess.run([sys.executable, "-m", "tools.book"], cwd=ROOT, check=True)
    return ROOT / "book" / "_build" / "html"


# Outermost, so that its line comes after the summary of failed and skipped tests.
@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(terminalreporter):
    """Say in the last lines that a run had no browser: its green must not pass for a whole one."""
    result = yield
    skipped = terminalreporter.stats.get("skipped", [])
    missed = sum("browser" in report.keywords for report in skipped)
    if missed:
        terminalreporter.write_line(
            f"NO BROWSER: {missed} tests of the page in a browser did not run. Install Chromium or "
            "Chrome, or name one with CHROMIUM=/path/to/it.",
            yellow=True,
            bold=True,
        )
    return result
