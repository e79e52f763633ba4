"""Pages of real comparisons, opened from files in Chromium: what is seen, clicked, typed and printed."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from tensorprobe.engine.output import read_result
from tensorprobe.report.page.comparison import STATUSES, comparison_page
from tensorprobe.report.page.data import matrix
from tensorprobe.report.page.html import to_html
from tests.web.browser import until
from tests.web.conftest import Watched
from tests.web.runs import MARKUP

Open = Callable[..., Watched]
Compared = Callable[[str], Path]
NAMED = "Functional.softmax.1.forward"


@pytest.fixture
def page_of(watched: Open, compared: Compared) -> Open:
    return lambda name, **context: watched(compared(name) / "report.html", **context)


def is_in_view(page: Any, selector: str) -> bool:
    box = page.locator(selector).first.bounding_box()
    size = page.viewport_size
    return bool(box and box["y"] >= 0 and box["y"] + box["height"] <= size["height"])


def test_the_verdict_is_seen_without_scrolling(page_of: Open) -> None:
    page = page_of("fault").page
    assert page.locator("h1").text_content() == "DIVERGED"
    for selector in ("h1", ".place", ".facts", ".counts", ".commands"):
        assert is_in_view(page, selector), selector
    told = page.locator(".verdict").inner_text()
    assert NAMED in told and "layers.1.softmax" in told and "agree exactly" in told
    assert "only the last 4 columns (28-31 of axis 2)" in told
    assert page.evaluate("scrollY") == 0


def test_the_counts_add_up(page_of: Open) -> None:
    page = page_of("fault").page
    total, *parts = [
        int(each.replace(",", "")) for each in re.findall(r"[\d,]+", page.locator(".counts p").inner_text())
    ]
    assert total == sum(parts) == 2 * 2 * 24


def test_the_counts_add_up_with_regions(page_of: Open) -> None:
    page = page_of("regions").page
    said = page.locator(".counts p").inner_text()
    total, *parts = [int(each.replace(",", "")) for each in re.findall(r"[\d,]+", said)]
    assert total == sum(parts) and "1 in regions" in said
    assert "1 region with the same result, all explained" in page.locator("#structure").inner_text()


def test_agreeing_runs_say_so_and_name_no_call(page_of: Open) -> None:
    page = page_of("clean").page
    assert page.locator("h1").text_content() == "AGREES"
    assert page.locator(".place").count() == 0
    assert page.locator(".sentence").inner_text().startswith("no output diverges")


def test_what_differs_between_the_programs_and_why_nothing_was_replayed_is_said(
    compared: Compared, watched: Open, tmp_path: Path
) -> None:
    result = read_result(compared("fault"))
    assert result.divergence is not None
    summary = replace(
        result.summary,
        differing=["threads: 1 / 8 (baseline / candidate)"],
        divergence=replace(result.divergence, unproved="softmax is not allowed to be replayed"),
    )
    text = to_html(comparison_page(summary, result.rows.batches, result.evidence))
    (tmp_path / "page.html").write_text(text, encoding="utf-8")
    told = watched(tmp_path / "page.html").page.locator(".verdict").inner_text()
    assert "the programs differ in threads: 1 / 8" in told
    assert "not replayed\nsoftmax is not allowed" in told


def test_the_source_line_and_the_stack_are_shown(page_of: Open) -> None:
    page = page_of("fault").page
    here = page.locator(".source .here")
    assert here.count() == 1 and here.inner_text().split(maxsplit=1)[0] == "1"
    assert "train.py:7" in page.locator(".stack").text_content()
    assert "dim=-1" in page.locator(".why .arguments").text_content()


def test_a_click_in_the_chart_leads_to_the_table_and_to_the_tensors(page_of: Open) -> None:
    held = page_of("fault")
    page = held.page
    call = NAMED.split(".forward")[0]
    until(page, "([s]) => document.querySelector('.rows .active')?.innerText.startsWith(s)", arg=["0\n" + call])
    chart = page.locator(".chart .top")
    chart.scroll_into_view_if_needed()
    box = chart.bounding_box()
    calls = page.evaluate("document.querySelector('.grid').getAttribute('aria-rowcount')")
    assert int(calls) == 2 * 48 * 2 + 1
    chart.press("ArrowRight")
    held.selects("The call Tensor.add.1.forward")
    until(page, "() => document.querySelector('.rows .active')?.innerText.includes('Tensor.add.1.forward')")
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 100)
    page.locator(".rows .line", has_text=NAMED).last.click()
    held.selects(NAMED)
    page.wait_for_selector(".maps canvas")
    until(page, "() => document.querySelector('.tensors .pattern')?.innerText.includes('only the last 4 columns')")
    page.locator(".maps canvas").nth(2).hover()
    until(page, "() => document.querySelector('.readout').innerText.includes('baseline')")


def test_the_hovered_call_is_named_and_a_brush_filters_what_is_below(page_of: Open) -> None:
    held = page_of("fault")
    page = held.page
    chart = page.locator(".chart .top")
    chart.scroll_into_view_if_needed()
    box = chart.bounding_box()
    for at in range(8, 60):  # the first call that the pointer meets
        page.mouse.move(box["x"] + 58 + at * 3, box["y"] + 95)
        page.evaluate("() => new Promise(done => setTimeout(done, 20))")  # the page has drawn what the pointer meets
        if page.locator(".tip").count():
            break
    assert "forward" in page.locator(".tip").inner_text()
    page.mouse.move(box["x"] + 60, box["y"] + 60)
    page.mouse.down()
    page.mouse.move(box["x"] + 60 + (box["width"] - 70) / 4, box["y"] + 60, steps=4)
    page.mouse.up()
    until(page, "() => parseInt(document.querySelector('.calls [role=status]').textContent.replace(',', '')) < 80")
    page.locator("header button", has_text="clear").press(
        "Enter"
    )  # where a click lands depends on what is still loading
    held.shows("192 of 192")


def test_text_regex_and_chips_filter_the_table(page_of: Open) -> None:
    held = page_of("fault")
    page = held.page
    held.shows("192 of 192")
    page.fill("input[type=search]", "softmax output.0")
    held.shows("16 of 192")
    page.locator(".chip", has_text=".*").click()
    page.fill("input[type=search]", r"softmax\.[01]\.forward$")
    held.shows("8 of 192")
    page.fill("input[type=search]", "softmax[")
    until(page, "() => document.querySelector('.calls [role=status]').textContent === 'not a valid expression'")
    page.locator("button", has_text="reset").click()
    held.shows("192 of 192")
    page.locator(".chip", has_text="introduced").click()
    page.locator(".chip", has_text="outputs").click()
    held.shows("2 of 192")
    page.locator("button", has_text="reset").click()
    page.locator(".tree li", has_text=re.compile(r"^▸?\s*gelu")).first.click()
    held.shows("8 of 192")


def test_a_column_sorts_and_columns_can_be_chosen(page_of: Open) -> None:
    page = page_of("fault").page
    page.locator(".head button", has_text="relative L2").click()
    page.wait_for_selector("[aria-sort=descending]")

    def errors() -> list[float]:
        return [float(text) for text in page.locator(".rows .line > span:nth-last-child(3)").all_inner_texts()]

    until(page, "() => document.querySelector('.rows .line').innerText.includes('e-')")
    assert errors() == sorted(errors(), reverse=True)
    page.locator("summary", has_text="Columns").click()
    page.locator(".choices label", has_text="max ULP").click()
    page.wait_for_selector(".head :text('max ULP')")


def test_the_table_is_walked_with_the_keyboard(page_of: Open) -> None:
    page = page_of("fault").page
    page.locator(".grid").focus()
    page.keyboard.press("Home")
    until(page, "() => document.querySelector('.grid').getAttribute('aria-activedescendant') === 'row-0'")
    for _ in range(3):
        page.keyboard.press("ArrowDown")
    until(page, "() => document.querySelector('.grid').getAttribute('aria-activedescendant') === 'row-3'")
    page.keyboard.press("End")
    until(page, "() => document.querySelector('.grid').getAttribute('aria-activedescendant') === 'row-191'")
    page.wait_for_selector("#row-191")
    page.locator(".tree").focus()
    for key in ("ArrowDown", "ArrowDown", "Enter"):
        page.keyboard.press(key)
    until(page, "() => document.querySelectorAll('.tree .chosen').length === 1")


def test_ranks_and_steps_are_a_matrix_that_filters(page_of: Open) -> None:
    held = page_of("eight_ranks")
    page = held.page
    canvas = page.locator(".matrix canvas")
    assert canvas.get_attribute("aria-label").endswith("introduced: rank 5")
    assert "on rank 5 only, of 8" in page.locator(".verdict").inner_text()
    canvas.scroll_into_view_if_needed()
    box = canvas.bounding_box()
    page.mouse.click(box["x"] + 56 + 60, box["y"] + 5.5 * (box["height"] - 22) / 8)
    held.shows("24 of 576")
    assert page.locator("select").input_value() == "5"


def test_one_bad_step_is_seen_among_a_thousand_ranks(compared: Compared, watched: Open, tmp_path: Path) -> None:
    result = read_result(compared("eight_ranks"))
    worst = {(rank, step): 0 for rank in range(1000) for step in range(300)}
    worst[777, 150] = list(STATUSES).index("introduced")
    made = comparison_page(result.summary, result.rows.batches, result.evidence)
    made = replace(made, matrix=matrix(worst))
    (tmp_path / "page.html").write_text(to_html(made), encoding="utf-8")
    page = watched(tmp_path / "page.html").page
    canvas = page.locator(".matrix canvas")
    assert canvas.get_attribute("aria-label").endswith("300. introduced: rank 777")
    assert canvas.bounding_box()["height"] < 700
    red = canvas.evaluate(
        """(canvas) => {
        const { data } = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
        let found = 0;
        for (let at = 0; at < data.length; at += 4) if (data[at] > 180 && data[at + 1] < 80 && data[at + 2] < 90) found++;
        return found;
        }"""
    )
    assert 0 < red < 100


def test_unmatched_calls_are_listed_with_the_nearest(page_of: Open) -> None:
    page = page_of("unmatched").page
    told = page.locator("#structure").inner_text()
    assert "Torch.clamp.0.forward" in told and "only in candidate" in told and "only in baseline" in told
    assert "dim" in told
    assert page.locator("a.chip", has_text="unmatched").count() == 1


def test_values_that_are_not_finite_are_counted_and_filtered(page_of: Open) -> None:
    held = page_of("nonfinite")
    page = held.page
    assert "NaN" in page.locator(".verdict").inner_text() or "inf" in page.locator(".verdict").inner_text()
    page.locator(".chip", has_text="NaN/inf").click()
    until(page, "() => document.querySelector('.calls [role=status]').textContent.startsWith('1 of')")


def test_a_result_without_tensors_has_a_page(page_of: Open) -> None:
    page = page_of("empty").page
    assert page.locator("h1").text_content() == "CANNOT COMPARE"
    assert page.locator(".grid").count() == 0


@pytest.mark.parametrize("part", [".verdict", ".why", ".tree", ".grid", "#selected", "#rest"])
def test_names_are_text_whatever_they_hold(page_of: Open, part: str) -> None:
    page = page_of("hostile").page
    assert page.evaluate("window.hacked") is None
    assert page.locator("img").count() == 0
    assert page.locator("script").count() == 2  # the data and our own
    assert page.locator("b").get_by_text("@all", exact=True).count() == 0
    if part in (".verdict", ".why", ".grid"):
        assert MARKUP[:20] in page.locator(part).inner_text()
    assert "\u202e" not in page.locator("body").inner_text() and "\x1b" not in page.locator("body").inner_text()


def test_the_policy_of_the_page_forbids_network_and_foreign_code(page_of: Open) -> None:
    held = page_of("fault")
    page = held.page
    policy = page.locator("meta[http-equiv]").get_attribute("content")
    assert "default-src 'none'" in policy and "connect-src 'none'" in policy and "unsafe" not in policy
    page.evaluate("document.body.insertAdjacentHTML('beforeend', '<p id=p onclick=\"window.hacked=1\">x</p>')")
    page.evaluate("document.getElementById('p').click()")
    assert page.evaluate("window.hacked") is None
    assert page.evaluate("fetch('https://example.com').then(() => 'sent', () => 'refused')") == "refused"
    refused = [text for text in held.problems if "Content Security Policy" in text or "Refused" in text]
    assert len(refused) == len(held.problems) >= 2
    held.problems.clear()
    held.requests[:] = [url for url in held.requests if "example.com" not in url]


def test_dark_mode_follows_the_system_and_can_be_chosen(page_of: Open) -> None:
    page = page_of("fault", color_scheme="dark").page
    ink = "getComputedStyle(document.body).backgroundColor"
    dark = page.evaluate(ink)
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    page.locator("header.bar button", has_text="Theme").click()  # light
    until(page, "() => document.documentElement.dataset.theme === 'light'")
    assert page.evaluate(ink) != dark


def test_the_page_speaks_chinese(page_of: Open) -> None:
    page = page_of("fault", locale="zh-CN").page
    assert page.locator("h1").text_content() == "存在分歧"
    assert "仅最后 4 列" in page.locator(".verdict").inner_text()
    page.locator("header.bar button", has_text="EN").click()
    until(page, "() => document.querySelector('h1').textContent === 'DIVERGED'")
    until(page, "() => document.documentElement.lang === 'en'")


def test_a_narrow_window_scrolls_in_one_direction_only(page_of: Open) -> None:
    page = page_of("fault", viewport={"width": 390, "height": 800}).page
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


def test_it_prints_on_white_paper(page_of: Open) -> None:
    page = page_of("fault", color_scheme="dark").page
    page.emulate_media(media="print")
    until(page, "() => document.documentElement.dataset.theme === 'light'")
    assert not page.locator(".filter").is_visible() and page.locator(".facts").is_visible()
    assert page.pdf()[:5] == b"%PDF-"


def test_a_screen_reader_finds_parts_and_labels(page_of: Open) -> None:
    page = page_of("fault").page
    headings = page.locator("h1, h2").all_inner_texts()
    assert headings[:3] == ["DIVERGED", "Why and where", "Error over execution"]
    unnamed = page.evaluate(
        """() => [...document.querySelectorAll('button, input, select, canvas, [role=grid], [role=tree], svg[role]')]
        .filter((each) => each.getAttribute('aria-hidden') !== 'true' && !each.closest('[aria-hidden=true]'))
        .filter((each) => !(each.getAttribute('aria-label') || each.textContent.trim() || each.closest('label')))
        .map((each) => each.outerHTML.slice(0, 80))"""
    )
    assert unnamed == []
    assert page.locator("[role=grid] [role=row]").count() > 10
    assert page.locator("main section[aria-labelledby]").count() >= 5


def test_commands_are_copied(page_of: Open, browser: Any) -> None:
    held = page_of("fault", permissions=["clipboard-read", "clipboard-write"])
    button = held.page.locator(".command button").first
    button.click()
    until(held.page, "() => document.querySelector('.command button').textContent === 'Copied'")


def test_a_hundred_thousand_rows_stay_within_the_budgets(page_of: Open, compared: Compared) -> None:
    """The budgets are those of `bench/page.py`; time limits here leave room for a busy machine."""
    from bench.page import FILTER, ROWS_A_FRAME, SCROLL, SIZE_MB

    assert (compared("many") / "report.html").stat().st_size < SIZE_MB * 1e6
    held = page_of("many")
    page = held.page
    held.shows("100,000 of 100,000")
    assert float(page.evaluate("document.documentElement.dataset.ready")) < 20_000
    assert page.evaluate(FILTER, "softmax") < 2000
    held.shows("16,664 of 100,000")
    page.fill("input[type=search]", "")
    held.shows("100,000 of 100,000")
    scrolled = page.evaluate(SCROLL, ROWS_A_FRAME)
    assert not scrolled["blank"]
    first = page.locator(".rows .line").first.get_attribute("id")
    assert abs(int(first.removeprefix("row-")) - 90 * ROWS_A_FRAME) < 200
