"""The built site: one page per entry of the table of contents, and nothing from another host."""

import re
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
import yaml

from tools import book
from tools.setup_cell import ROOT, repository_url

TOC = yaml.safe_load((ROOT / "book" / "_toc.yml").read_text(encoding="utf-8"))


class Loads(HTMLParser):
    """Collects what a browser fetches by itself when it shows a page: links to click are not."""

    def __init__(self):
        super().__init__()
        self.addresses = []

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        self.addresses += filter(None, [attributes.get("src"), attributes.get("poster")])
        if tag == "link" and attributes.get("rel") not in ("index", "search", "next", "prev"):
            self.addresses.append(attributes["href"])


def loads_of(page):
    parser = Loads()
    parser.feed(page.read_text(encoding="utf-8"))
    return [address for address in parser.addresses if not address.startswith("data:")]


def pages_of(site):
    """Return the pages of the site; its _static also has a template of the theme."""
    return [page for page in site.rglob("*.html") if "_static" not in page.parts]


def test_a_document_without_a_page_is_noticed(tmp_path):
    (tmp_path / "book").mkdir()
    (tmp_path / "book" / "_toc.yml").write_text(
        "format: jb-book\nroot: book/intro\nparts:\n- chapters:\n"
        "  - file: notebooks/one\n    sections:\n    - file: notebooks/two\n"
    )
    site = tmp_path / "site"
    (site / "book").mkdir(parents=True)
    (site / "book" / "intro.html").touch()
    assert book.missing_pages(tmp_path, site) == ["notebooks/one", "notebooks/two"]


def test_every_chapter_on_disk_is_in_the_table_of_contents():
    on_disk = {f"notebooks/{path.stem}" for path in (ROOT / "notebooks").glob("*.ipynb")}
    on_disk |= {f"book/{path.stem}" for path in (ROOT / "book").glob("*.md")}
    assert on_disk == set(book.toc_documents(TOC))


@pytest.mark.parametrize("document", book.toc_documents(TOC))
def test_a_document_has_its_page(book_site, document):
    assert (book_site / f"{document}.html").stat().st_size > 0


def test_the_site_is_marked_as_not_for_jekyll(book_site):
    assert (book_site / ".nojekyll").is_file()


def test_pages_load_only_files_of_the_site(book_site):
    faults = []
    for page in pages_of(book_site):
        for address in loads_of(page):
            parts = urlsplit(address)
            file = (page.parent / unquote(parts.path)).resolve()
            if parts.scheme or parts.netloc or not file.is_file():
                faults.append(f"{page.relative_to(book_site)} loads {address}")
    assert faults == []


def test_style_sheets_load_only_files_of_the_site(book_site):
    faults = [
        f"{sheet.relative_to(book_site)}: {match}"
        for sheet in book_site.rglob("*.css")
        for match in re.findall(
            r"(?:@import|url\()\s*[\"']?(?:https?:)?//[^\s\"')]+",
            sheet.read_text(encoding="utf-8"),
        )
    ]
    assert faults == []


@pytest.mark.parametrize("document", book.toc_documents(TOC))
def test_a_page_has_no_stored_widgets_and_the_right_year(book_site, document):
    page = (book_site / f"{document}.html").read_text(encoding="utf-8")
    assert "application/vnd.jupyter.widget" not in page
    assert "require.min.js" not in page
    assert "Copyright 2026" in page


@pytest.mark.parametrize("document", [d for d in book.toc_documents(TOC) if "notebooks/" in d])
def test_the_launch_button_opens_the_chapter_on_colab(book_site, document):
    owner_and_name = urlsplit(repository_url()).path
    page = (book_site / f"{document}.html").read_text(encoding="utf-8")
    colab = "https://colab.research.google.com/github"
    assert f'href="{colab}{owner_and_name}/blob/main/{document}.ipynb"' in page


def test_pages_typeset_formulas_with_the_site_s_own_mathjax(book_site):
    page = book_site / "book" / "conventions.html"
    scripts = [address for address in loads_of(page) if "mathjax" in address.lower()]
    assert [Path(urlsplit(address).path).name for address in scripts] == ["tex-mml-chtml.js"]
