"""A comparison as JUnit XML, for a build server: a test case for each rank, which fails when that rank diverges.

Characters that XML cannot hold are left out; everything else from a run is text, never markup.
"""

from __future__ import annotations

from xml.etree.ElementTree import Element, SubElement, tostring

from tensorprobe.model.comparison import Comparison, RankAnswer
from tensorprobe.report import phrases, wording
from tensorprobe.report.compare_text import render_comparison
from tensorprobe.text import xml

_SUITE = "tensorprobe compare"


def render_junit(comparison: Comparison, *, limit: int = 10) -> str:
    """The XML document, with the whole text report as the output of the suite."""
    suite = Element("testsuite", name=_SUITE, time=f"{comparison.elapsed_s:.3f}")
    for answer in comparison.ranks:
        _rank(suite, answer)
    headline = wording.headline(comparison)
    if (
        headline in ("CANNOT COMPARE", "UNFINISHED")
        or not comparison.ranks
        or (headline == "DIVERGED" and not _failed(suite))
    ):
        _whole(suite, comparison, headline)
    cases = suite.findall("testcase")
    suite.set("tests", str(len(cases)))
    suite.set("failures", str(_failed(suite)))
    suite.set("errors", str(sum(case.find("error") is not None for case in cases)))
    SubElement(suite, "system-out").text = xml(render_comparison(comparison, limit=limit))
    root = Element("testsuites")
    root.append(suite)
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{tostring(root, encoding="unicode")}\n'


def _rank(suite: Element, answer: RankAnswer) -> None:
    case = SubElement(suite, "testcase", classname=_SUITE, name=f"rank {answer.rank}")
    if answer.answer == "agrees":
        return
    if (divergence := answer.divergence) is None:
        SubElement(case, "failure", type="diverged", message="the runs make different calls")
        return
    message = xml(f"first at {wording.where(divergence)}")
    failure = SubElement(case, "failure", type=divergence.status, message=message)
    text = f"{message}\n{wording.evidence(divergence)}"
    failure.text = xml(f"{text}\n{phrases.place_of(divergence.source)}" if divergence.source else text)


def _whole(suite: Element, comparison: Comparison, headline: str) -> None:
    """A case for what belongs to no rank, so that a build never passes on a comparison that did not."""
    case = SubElement(suite, "testcase", classname=_SUITE, name="all ranks")
    if headline != "AGREES":
        kind = "failure" if headline == "DIVERGED" else "error"
        SubElement(case, kind, type=headline.lower(), message=xml(wording.verdict(comparison)))


def _failed(suite: Element) -> int:
    return len(suite.findall("testcase/failure"))
