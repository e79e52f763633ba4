"""Sentences a reader meets first: what they say of clean runs, masks, zeros, keywords and missing calls."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import tensorprobe
from tensorprobe.errors import SettingsError
from tensorprobe.model import Call
from tensorprobe.pairing.call_pairs import call_facts
from tensorprobe.report.wording import found_in_all
from tensorprobe.text import annotation, code, message, plain, sheet_text, shell, xml
from tests.report import made


def test_zero_divided_by_zero_is_named() -> None:
    with tensorprobe.overflow() as watch:
        _ = torch.tensor([0.0, 0.5]) / torch.tensor([0.0, 0.9696])
    text = str(watch.result)
    assert text.startswith("FIRST NAN in Tensor.div.0.forward, step 0, rank 0\n")
    assert "contains zeros: division by zero" in text and "times below the limit" not in text
    assert not watch.result and watch.result.exit_code == 1


def test_masks_are_intentional() -> None:
    with tensorprobe.overflow() as watch:
        torch.zeros(4).masked_fill(torch.tensor([True, False, True, False]), float("-inf")).softmax(0)
    assert str(watch.result).startswith("FINITE: no unexpected NaN or inf in ")
    assert "all infinities are intentional (masks)" in str(watch.result).splitlines()[0]
    assert watch.result and watch.result.exit_code == 0


@pytest.mark.parametrize(
    ("ours", "theirs", "said"),
    [
        ({}, {"approximate": "tanh"}, "kwarg approximate: absent → 'tanh'"),
        (None, {"approximate": "tanh"}, "kwarg approximate: absent → 'tanh'"),
        ({"dim": 1}, {"dim": 2}, "kwarg dim: 1 → 2"),
        ({"dim": 1}, {}, "kwarg dim: 1 → absent"),
    ],
)
def test_a_keyword_that_differs_is_named(ours: object, theirs: object, said: str) -> None:
    calls = [Call(name="Functional.gelu.0.forward", args=[2], kwargs=kwargs) for kwargs in (ours, theirs)]  # type: ignore[arg-type]
    assert list(call_facts(*calls)) == [("arguments", said)]


def test_an_absent_keyword_is_its_default() -> None:
    calls = [
        Call(name="Functional.gelu.0.forward", args=[2], kwargs=kwargs) for kwargs in ({}, {"approximate": "none"})
    ]  # type: ignore[arg-type]
    assert list(call_facts(*calls)) == []


def test_a_position_that_differs_is_named() -> None:
    calls = [Call(name="Torch.sum.0.forward", args=args, kwargs={}) for args in ([1, 2], [1, 3, 4])]  # type: ignore[list-item]
    assert list(call_facts(*calls)) == [("arguments", "argument dim: 2 → 3")]


def test_calls_of_one_side_are_counted() -> None:
    findings = [made.finding(index=index) for index in range(7)]
    assert found_in_all(made.comparison(findings=findings, findings_total=7)) == (
        "7 calls or arguments differ (5 only in baseline, 2 only in candidate)"
    )


HOSTILE = "a\x1b[31m\nb\u202ec"


def test_foreign_text_is_harmless_in_every_form() -> None:
    assert plain(HOSTILE) == "a\\x1b[31m\\nb\\u202ec"
    assert message(f"no run in {HOSTILE}.\n  Try this.") == f"no run in {plain(HOSTILE)}.\n  Try this."
    assert shell(HOSTILE) == f"'{plain(HOSTILE)}'"
    assert (
        sheet_text("=cmd()") == "'=cmd()" and sheet_text("\uff1dcmd()") == "'\uff1dcmd()" and sheet_text("a=b") == "a=b"
    )
    assert "`" not in code("a`b|c").removeprefix("`") and code("x") == "`x`"
    assert xml("a\x00b\x1bc") == "abc"
    assert annotation("a\n::error::b%") == "a%0A::error::b%25"
    assert annotation("a:b,c", is_property=True) == "a%3Ab%2Cc"


def test_a_path_in_an_error_cannot_command_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from tensorprobe.report.ending import guarded

    def fail() -> None:
        raise SettingsError(f"no folder {HOSTILE}.\n  Pass another.")

    with pytest.raises(SystemExit):
        guarded(fail)
    assert capsys.readouterr().err == f"SettingsError: no folder {plain(HOSTILE)}.\n  Pass another.\n"
