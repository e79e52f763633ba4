"""Results in a notebook: the answer as a card, the page in a frame, and nothing foreign as markup."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import tensorprobe
from tensorprobe.report.notebook import card


def record(folder: Path, factor: float) -> Path:
    with tensorprobe.capture(folder):
        (torch.ones(3) * factor).exp()
    return folder


def test_a_result_shows_its_answer_and_its_page(tmp_path: Path) -> None:
    result = tensorprobe.compare(record(tmp_path / "a", 1.0), record(tmp_path / "b", 2.0), prove="off")
    shown = result._repr_html_()
    assert "DIVERGED</b>" in shown and "Tensor.mul.0.forward" in shown
    assert repr(result).startswith("<comparison: DIVERGED first at step 0")
    frame = result.show(height=300)._repr_html_()
    assert frame.startswith("<iframe srcdoc=") and "height:300px" in frame and "<script" not in frame
    assert tensorprobe.overflow(tmp_path / "a")._repr_html_().count("FINITE") == 1


def test_the_report_of_a_watch_is_text_and_a_card(tmp_path: Path) -> None:
    with tensorprobe.overflow(out=tmp_path / "overflow") as overflow:
        torch.log(-torch.ones(2))
    with tensorprobe.online(out=tmp_path / "online") as online:
        torch.ones(3).exp()
    for report, first, colour in ((overflow.report, "FIRST NAN in", "#cf222e"), (online.report, "AGREES", "#1a7f37")):
        assert report.startswith(first)
        assert first in report._repr_html_() and colour in report._repr_html_()


def test_foreign_text_stays_text() -> None:
    shown = card("DIVERGED  <script>alert(1)</script>\n<img src=x onerror=y>", 1)
    assert "<script" not in shown and "<img" not in shown and "&lt;script&gt;" in shown


def test_rows_become_frames_of_other_libraries(tmp_path: Path) -> None:
    rows = tensorprobe.compare(record(tmp_path / "a", 1.0), tmp_path / "a").rows
    pandas = pytest.importorskip("pandas")
    assert isinstance(rows.to_pandas(), pandas.DataFrame) and len(rows.to_pandas()) == len(rows)


def test_calls_are_chosen_by_op_and_module(tmp_path: Path) -> None:
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(2, 2), "b": torch.nn.Linear(2, 2)})
    with tensorprobe.capture(tmp_path / "run", model=model):
        model["b"](model["a"](torch.ones(1, 2)).relu())
    run = tensorprobe.open_run(tmp_path / "run")
    assert [call.name for call in run.calls(op="linear")] == [f"Functional.linear.{n}.forward" for n in (0, 1)]
    assert [call.name for call in run.calls(op="linear", module="b")] == ["Functional.linear.1.forward"]
    assert [call.name for call in run.calls(op="Tensor.rel*")] == ["Tensor.relu.0.forward"]
