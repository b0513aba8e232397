"""A Chromium for the tests of the built page, and the site on a free local port."""

import os
import shutil
import threading
from contextlib import contextmanager
from pathlib import Path

from tools.serve import make_server

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
MACOS = "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome"
QUIET = [
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


def find_chromium() -> str | None:
    """Return the path of a Chromium: $CHROMIUM, one on the PATH, or macOS's usual place."""
    candidates = [os.environ.get("CHROMIUM"), *map(shutil.which, NAMES), MACOS]
    return next((path for path in candidates if path and Path(path).exists()), None)


@contextmanager
def running(server):
    """Serve in the background; yields the address."""
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def served(folder: Path):
    """Serve a folder on a free port of this machine; the context is its address."""
    return running(make_server(folder, 0))
