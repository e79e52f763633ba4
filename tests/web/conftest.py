"""One browser for all tests here, and the pages of comparisons that are made once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import tensorprobe
from tests.web import runs
from tests.web.browser import CHROMIUM, open_browser, until

pytestmark = pytest.mark.xdist_group("web")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All tests with a browser run in one worker, one after the other; without a browser they are skipped."""
    for item in items:
        if "browser" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.xdist_group("web"))
            if CHROMIUM is None:
                item.add_marker(pytest.mark.skip(reason="no Chromium: make browser"))


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    with open_browser() as opened:
        yield opened


@pytest.fixture(scope="session")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a result, by the name of a function in `runs`; each is compared once."""
    known: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in known:
            place = tmp_path_factory.mktemp(name)
            tensorprobe.compare(*getattr(runs, name)(place), out=place / "result", prove="off", threads=1)
            known[name] = place / "result"
        return known[name]

    return folder


class Watched:
    """A page in the browser; what it logs, throws and asks the network for is kept."""

    def __init__(self, page: Any) -> None:
        self.page = page
        self.problems: list[str] = []
        self.requests: list[str] = []
        page.on("console", lambda message: message.type in ("error", "warning") and self.problems.append(message.text))
        page.on("pageerror", lambda error: self.problems.append(str(error)))
        page.on("request", lambda request: self.requests.append(request.url))

    def open(self, url: str) -> Watched:
        self.page.goto(url)
        self.page.wait_for_selector("html[data-ready]", timeout=60_000)
        return self

    def status(self) -> str:
        """How many rows are shown, of how many."""
        return str(self.page.locator(".calls [role=status]").text_content())

    def shows(self, text: str) -> None:
        until(
            self.page,
            "([text]) => document.querySelector('.calls [role=status]').textContent.includes(text)",
            arg=[text],
        )

    def selects(self, call: str) -> None:
        until(self.page, "([call]) => document.querySelector('#selected-title')?.innerText.includes(call)", arg=[call])


@pytest.fixture
def watched(browser: Any) -> Iterator[Callable[..., Watched]]:
    """Open pages; at the end nothing may have gone wrong in them, and nothing may have been asked of the network."""
    opened: list[Watched] = []

    def open_page(url: str | Path, *, network: str = "", **context: Any) -> Watched:
        options = {"viewport": {"width": 1280, "height": 800}, "locale": "en-US", **context}
        page = Watched(browser.new_context(**options).new_page())
        opened.append(page)
        page.network = network  # type: ignore[attr-defined]
        return page.open(url.as_uri() if isinstance(url, Path) else url)

    yield open_page
    for each in opened:
        network = each.network  # type: ignore[attr-defined]
        outside = [url for url in each.requests if not url.startswith(("file:", "data:", "blob:", network or "file:"))]
        each.page.context.close()
        assert each.problems == []
        assert outside == []
