"""Budgets of the page, in headless Chromium: its size, when it is ready, how fast it filters and scrolls.

    python -m bench.page [--rows 100000 1000000]

For each number of rows a comparison is made in which every pair of tensors differs, the worst case for its size. Each figure is
printed beside its budget, and the exit code is 1 if one is exceeded.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import tensorprobe
from tensorprobe.report.page.comparison import comparison_page
from tensorprobe.report.page.html import to_html
from tests.web.browser import open_browser
from tests.web.runs import many

SIZE_MB, READY_S, FILTER_MS, FRAME_MS = 3.0, 2.0, 100.0, 17.0
ROWS_A_FRAME = 60

FILTER = """async (text) => {
  const input = document.querySelector('input[type=search]'), status = document.querySelector('.calls [role=status]');
  const started = performance.now(), before = status.textContent;
  const kinds = { childList: true, characterData: true, subtree: true };
  const changed = new Promise((resolve) => new MutationObserver(resolve).observe(status, kinds));
  input.value = text;
  input.dispatchEvent(new InputEvent('input', { bubbles: true }));
  await changed;
  await new Promise(requestAnimationFrame);
  return performance.now() - started;
}"""
SCROLL = """async (rows) => {
  const box = document.querySelector('.scroll');
  box.scrollTop = 0;
  const frame = () => new Promise(requestAnimationFrame);
  const times = [];
  for (let last = await frame(), at = 0; at < 90; at++) {
    box.scrollTop += rows * 27;
    const now = await frame();
    times.push(now - last);
    last = now;
  }
  times.sort((a, b) => a - b);
  return { median: times[45], worst: times[85], blank: document.querySelectorAll('.rows .line').length === 0 };
}"""


def measure(page: Any, path: Path) -> dict[str, float]:
    """Open a page and return its figures."""
    page.goto(path.as_uri())
    page.wait_for_selector("html[data-ready]", timeout=120_000)
    filters = [page.evaluate(FILTER, text) for text in ("softmax", "layers.3", "nothing fits this", "output.0", "")]
    scrolled = page.evaluate(SCROLL, ROWS_A_FRAME)
    return {
        "size_mb": path.stat().st_size / 1e6,
        "ready_s": float(page.evaluate("document.documentElement.dataset.ready")) / 1000,
        "filter_ms": sorted(filters)[len(filters) // 2],
        "frame_ms": scrolled["median"],
        "blank": scrolled["blank"],
    }


def main() -> int:
    """Make the pages, measure them, print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[100_000, 1_000_000])
    asked = parser.parse_args()
    found: dict[str, Any] = {}
    failed = False
    print(f"{'rows':>9}  {'page':<8} {'made in':>8} {'size':>9} {'ready':>8} {'filter':>9} {'frame of 60 rows':>17}")
    with tempfile.TemporaryDirectory() as folder, open_browser() as browser:
        for rows in asked.rows:
            runs = many(Path(folder) / str(rows), rows)
            result = tensorprobe.compare(*runs, prove="off")
            for full in (False, True):
                started = time.process_time()
                text = to_html(comparison_page(result.summary, result.rows.batches, result.evidence, full=full))
                made_s = time.process_time() - started
                path = Path(folder) / "page.html"
                path.write_text(text, encoding="utf-8")
                page = browser.new_page()
                figures = measure(page, path)
                page.close()
                found[f"{rows} {'full' if full else 'default'}"] = {**figures, "made_s": made_s}
                budget = rows <= 100_000
                over = budget and (
                    (not full and figures["size_mb"] > SIZE_MB)
                    or figures["ready_s"] > READY_S
                    or figures["filter_ms"] > FILTER_MS
                    or figures["frame_ms"] > FRAME_MS
                )
                failed |= bool(over or figures["blank"])
                print(
                    f"{rows:>9,}  {'--full' if full else 'default':<8} {made_s:>6.2f} s {figures['size_mb']:>6.2f} MB "
                    f"{figures['ready_s']:>6.2f} s {figures['filter_ms']:>6.0f} ms {figures['frame_ms']:>14.1f} ms"
                    + ("   over budget" if over else "")
                )
    print(
        f"Budgets at 100,000 rows: {SIZE_MB:g} MB by default, {READY_S:g} s, {FILTER_MS:g} ms, {FRAME_MS:g} ms a frame."
    )
    target = Path("bench/results/page.json")
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps(found, indent=1), encoding="utf-8")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
