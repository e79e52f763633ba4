"""The forms for build servers and pull requests: Markdown, annotations of GitHub, JUnit."""

from __future__ import annotations

import re
from html import unescape
from xml.etree import ElementTree

import pytest

from tensorprobe.model.call import Frame
from tensorprobe.model.comparison import Buckets, Comparison
from tensorprobe.report.github import render_github
from tensorprobe.report.junit import render_junit
from tensorprobe.report.markdown import code, render_markdown
from tensorprobe.text import plain
from tests.report import made

CANNOT = made.agreeing(buckets=Buckets(only_baseline=3), exit_code=2, statuses={})


def test_markdown_has_the_divergence_as_a_table() -> None:
    text = render_markdown(made.comparison(findings=[made.finding()], externals=[made.external()], notes=["weaker"]))
    assert text.startswith(
        "### tensorprobe: the runs diverge at `Torch.matmul.12.forward`\n\n"
        "| | |\n|---|---|\n"
        "| first at | step 3, rank 0 |\n"
        "| call | `Torch.matmul.12.forward` |\n"
        "| module | `layers.7.mlp.down_proj` |\n"
        "| source | `model.py:88` `y = x @ w` |\n"
        "| inputs | agree exactly |\n"
        "| tensor | `output.0` (`bfloat16` `[8, 4096]`) |\n"
        "| error | max \\|Δ\\| 3.1e-02 at [4, 17], relative L2 2.4e-01 (allowed 1.6e-02) |\n"
        "| verdict | introduced here |\n\n"
        "- parameters differ before step 0: `layers.3.weight`, `scaled by 1.01`\n"
        "- note: `weaker`\n\n"
        "1,204 calls: 1,187 agree · 9 diverge"
    )
    assert "| 0 | 0 | `Torch.add.3.forward` | only in baseline | `model.py:12` | `Torch.add.2.forward` |" in text
    assert text.endswith("97 filtered, 0 failed\n\n</details>\n")


def test_markdown_of_agreement_structure_and_nothing_compared() -> None:
    assert render_markdown(made.agreeing()).startswith(
        "### tensorprobe: agrees: no output diverges in 1,196 pairs of calls, 4 steps, 1 rank\n\n1,196 calls: 1,196 agree"
    )
    structural = render_markdown(made.comparison(divergence=made.structural()))
    assert "| structure | only in baseline |\n| nearest | `Torch.add.2.forward` |" in structural
    assert render_markdown(CANNOT).startswith("### tensorprobe: cannot compare: 0 of 3 calls have a partner")


def test_markdown_counts_what_it_leaves_out() -> None:
    ranks = [made.rank_answer(rank, divergence=made.divergence(rank=rank)) for rank in range(5)]
    text = render_markdown(
        made.comparison(ranks=[*ranks, made.rank_answer(5)], findings=[made.finding()] * 4, findings_total=90), limit=2
    )
    assert "5 of 6 ranks diverge." in text
    assert "| … | and 3 more |" in text
    assert "90 calls or arguments differ" in text
    assert "| … | | and 88 more | | | |" in text


def test_markdown_holds_hostile_names_in_code() -> None:
    text = render_markdown(made.hostile())
    assert [sign for sign in text if not sign.isprintable() and sign != "\n"] == []
    bare = re.sub(r"`[^`\n]*`|<code>[\w &#;]*</code>", "", text)
    assert not set(bare) & set("`@")
    assert set(re.findall("<[^>]*>", bare)) == {"<details>", "<summary>", "</summary>", "</details>"}
    tables = [line for line in bare.splitlines() if line.startswith("| ")]
    assert {line.replace(r"\|", "").count("|") for line in tables} == {3, 7}


@pytest.mark.parametrize("text", ["a|b", "`", "a\\|b", "``x", "</code>|", made.HOSTILE])
def test_code_shows_the_text_itself(text: str) -> None:
    shown = code(text)
    assert unescape(shown.removeprefix("<code>").removesuffix("</code>")) == plain(text)
    assert not set(shown.removeprefix("<code>").removesuffix("</code>")) & set("`|\\<>@")


def test_code_of_nothing_is_nothing() -> None:
    assert code("") == ""
    assert code("relu") == "`relu`"


def test_github_gets_an_error_where_the_divergence_is() -> None:
    text = render_github(made.comparison(findings=[made.finding()], externals=[made.external()]))
    error, external, finding = text.splitlines()
    assert error.startswith(
        "::error file=model.py,line=88,title=tensorprobe%3A diverged::DIVERGED  first at step 3, rank 0: Torch.matmul.12"
    )
    assert "model.py:88%0Ainputs agree exactly; max |Δ| 3.1e-02" in error
    assert external == (
        "::warning title=differs before the first call::parameters differ before step 0: layers.3.weight, scaled by 1.01"
    )
    assert finding.startswith(
        "::warning file=model.py,line=12,title=step 0%2C rank 0%3A the calls differ::step 0, rank 0"
    )


def test_github_gets_a_notice_when_all_agree_and_an_error_when_nothing_was_compared() -> None:
    assert render_github(made.agreeing()).startswith("::notice title=tensorprobe%3A agrees::AGREES  no output diverges")
    assert render_github(CANNOT).startswith("::error title=tensorprobe%3A cannot compare::CANNOT COMPARE  0 of 3 calls")


def test_github_does_not_tell_the_answer_twice_and_counts_the_rest() -> None:
    answer = made.finding()
    findings = [answer, *(made.finding(index=index) for index in (8, 9, 10))]
    comparison = made.comparison(divergence=made.structural(finding=answer), findings=findings, findings_total=50)
    lines = render_github(comparison, limit=2).splitlines()
    assert [line.split(" ")[0] for line in lines] == ["::error", "::warning", "::warning", "::warning"]
    assert lines[-1] == "::warning title=more::47 more calls or arguments differ"


def test_github_gets_files_relative_to_the_checkout() -> None:
    at = made.divergence(source=Frame("/home/ci/repo/src/model.py", 88, "forward"))
    assert "file=src/model.py,line=88" in render_github(made.comparison(divergence=at), root="/home/ci/repo/")
    assert "file=/home/ci/repo/src/model.py," in render_github(made.comparison(divergence=at), root="/home/ci/rep")


def test_github_commands_cannot_be_forged() -> None:
    lines = render_github(made.hostile()).splitlines()
    assert [line.split(" ")[0] for line in lines] == ["::error", "::warning", "::warning", "::warning"]
    for line in lines:
        assert line.isprintable()
        assert set(re.findall("%(?!25|0A|0D|3A|2C)", line)) == set()
        properties = line[2:].partition("::")[0].partition(" ")[2]
        assert {part.partition("=")[0] for part in properties.split(",")} <= {"file", "line", "title"}


def junit(comparison: Comparison) -> ElementTree.Element:
    suite = ElementTree.fromstring(render_junit(comparison).encode()).find("testsuite")
    assert suite is not None
    return suite


def test_junit_has_a_case_for_each_rank() -> None:
    ranks = [made.rank_answer(0, divergence=made.divergence()), made.rank_answer(1)]
    suite = junit(made.comparison(ranks=ranks))
    assert {key: suite.get(key) for key in ("tests", "failures", "errors", "time")} == {
        "tests": "2",
        "failures": "1",
        "errors": "0",
        "time": "3.250",
    }
    failed, passed = suite.findall("testcase")
    assert (failed.get("name"), passed.get("name"), len(passed)) == ("rank 0", "rank 1", 0)
    failure = failed.find("failure")
    assert failure is not None
    assert failure.get("type") == "introduced"
    assert failure.text is not None
    assert failure.text.splitlines() == [
        "first at step 3, rank 0: Torch.matmul.12.forward in module 'layers.7.mlp.down_proj', output.0 (bfloat16 [8, 4096])",
        "inputs agree exactly; max |Δ| 3.1e-02 at [4, 17], relative L2 2.4e-01 (allowed 1.6e-02): introduced here",
        "model.py:88",
    ]
    assert (suite.findtext("system-out") or "").startswith("DIVERGED  first at step 3")


def test_junit_never_passes_on_what_did_not() -> None:
    assert junit(CANNOT).get("errors") == "1"
    nowhere = made.comparison(
        divergence=None, answer="diverged", exit_code=1, ranks=[made.rank_answer(0)], findings=[made.finding()]
    )
    assert (junit(nowhere).get("failures"), junit(nowhere).get("tests")) == ("1", "2")
    unplaced = made.comparison(ranks=[made.rank_answer(0, answer="diverged")])
    assert junit(unplaced).get("failures") == "1"


def test_junit_of_agreement_passes() -> None:
    assert (junit(made.agreeing()).get("failures"), junit(made.agreeing()).get("tests")) == ("0", "1")
    assert junit(made.agreeing(ranks=[])).get("tests") == "1"


def test_junit_is_xml_whatever_the_names_are() -> None:
    suite = junit(made.hostile())
    assert len(suite.findall("testcase")) == 2
    assert suite.findall(".//b") == []
    failure = suite.find("testcase/failure")
    assert failure is not None
    assert "<b>@all</b>&]]>" in (failure.get("message") or "")
