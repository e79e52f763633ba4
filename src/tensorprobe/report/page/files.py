"""Pages as files, for the table of forms."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tensorprobe.report.page.checks import checks_page
from tensorprobe.report.page.comparison import comparison_page
from tensorprobe.report.page.html import to_html
from tensorprobe.report.page.watches import overflow_page


def write_comparison(result: Any, path: Path) -> None:
    """Write the page of a comparison."""
    path.write_text(to_html(comparison_page(result.summary, result.rows.batches, result.evidence)), encoding="utf-8")


def write_checks(result: Any, path: Path) -> None:
    """Write the page of a precheck or an audit."""
    path.write_text(to_html(checks_page(result.summary, result.evidence)), encoding="utf-8")


def write_overflow(result: Any, path: Path) -> None:
    """Write the page of an overflow report."""
    path.write_text(to_html(overflow_page(result.summary)), encoding="utf-8")
