"""Pages by the kind of a result, and as files, for the table of forms."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tensorprobe.model.comparison import Comparison
from tensorprobe.model.online import OnlineResult
from tensorprobe.model.precheck import Precheck
from tensorprobe.report.page.checks import checks_page
from tensorprobe.report.page.comparison import comparison_page
from tensorprobe.report.page.data import Page
from tensorprobe.report.page.html import to_html
from tensorprobe.report.page.watches import online_page, overflow_page


def page_of(result: Any, *, rows: bool = True, **options: bool) -> Page:
    """Return the page of a result of compare, precheck, audit, online or overflow. `rows` is for a comparison."""
    if isinstance(result, OnlineResult):
        return online_page(result, **options)
    summary = result.summary
    if isinstance(summary, Comparison):
        return comparison_page(summary, result.rows.batches, result.evidence, **options, rows=rows)
    if isinstance(summary, Precheck):
        return checks_page(summary, result.evidence, **options)
    return overflow_page(summary, **options)


def write_page(result: Any, path: Path) -> None:
    """Write the page of a result."""
    path.write_text(to_html(page_of(result)), encoding="utf-8")
