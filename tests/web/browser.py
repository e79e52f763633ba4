"""Debian's Chromium, driven by Playwright: no sandbox as root, no GPU, no connection of its own."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
    "--disable-dev-shm-usage",
]


@contextmanager
def open_browser() -> Iterator[Any]:
    """A browser with a profile of its own, which is removed at the end."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        try:
            yield browser
        finally:
            browser.close()


def until(page: Any, expression: str, arg: Any = None) -> None:
    """Wait until an expression is true, asked by a timer: a loaded machine may paint no frame for a long time."""
    from playwright.sync_api import TimeoutError as NeverTrue

    try:
        page.wait_for_function(expression, arg=arg, polling=50)
    except NeverTrue:
        seen = page.evaluate(
            "[...document.querySelectorAll('[role=status], header button, [aria-pressed=true]')].map((each) => each.innerText)"
        )
        raise AssertionError(f"never true: {expression} with {arg}; the page says {seen}") from None
