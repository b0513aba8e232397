"""The local server of the book."""

import urllib.error
import urllib.request

import pytest
from browser import running

from tools.serve import make_server


def test_a_port_that_an_earlier_run_still_holds_is_no_obstacle(tmp_path):
    (tmp_path / "index.html").write_text("the book")
    with running(make_server(tmp_path, 0)) as first:
        port = int(first.rpartition(":")[2])
        with running(make_server(tmp_path, port)) as second:
            assert second != first
            assert urllib.request.urlopen(second).read() == b"the book"


@pytest.mark.parametrize(
    ("name", "content_type"),
    [
        ("live.js", "text/javascript"),
        ("pyodide.mjs", "text/javascript"),
        ("pyodide.asm.wasm", "application/wasm"),
    ],
)
def test_a_file_has_the_type_that_browsers_insist_on(tmp_path, name, content_type):
    (tmp_path / name).touch()
    with running(make_server(tmp_path, 0)) as address:
        answer = urllib.request.urlopen(f"{address}/{name}")
        assert answer.headers.get_content_type() == content_type


def test_nothing_outside_the_book_is_served(tmp_path):
    (tmp_path / "site").mkdir()
    (tmp_path / "secret").touch()
    with (
        running(make_server(tmp_path / "site", 0)) as address,
        pytest.raises(urllib.error.HTTPError, match="404"),
    ):
        urllib.request.urlopen(f"{address}/%2e%2e/secret")
