"""Serve the built book on this machine only: ``python -m tools.serve``."""

import argparse
import functools
import http.server
from pathlib import Path

SITE = Path(__file__).resolve().parent.parent / "book" / "_build" / "html"


class SiteHandler(http.server.SimpleHTTPRequestHandler):
    # The browser refuses a module or WebAssembly under another type, and a Windows registry may
    # hold another type for .js.
    extensions_map = {
        **http.server.SimpleHTTPRequestHandler.extensions_map,
        ".js": "text/javascript",
        ".mjs": "text/javascript",
        ".wasm": "application/wasm",
    }

    def log_message(self, format, *args):
        """Keep quiet: a page asks for some 20 files."""


def make_server(folder, port):
    """Return a server of ``folder`` on ``port``, or on any free port where that one is taken."""
    handler = functools.partial(SiteHandler, directory=folder)
    try:
        return http.server.ThreadingHTTPServer(("127.0.0.1", port), handler)
    except OSError:
        return http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=8000)
    with make_server(SITE, parser.parse_args().port) as server:
        print(f"The book: http://127.0.0.1:{server.server_port}/ (stop with Ctrl+C)", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print()


if __name__ == "__main__":
    main()
