"""What an answer of `compare` is worth, given the truth."""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatch
from typing import Any

from bench.heldout.truth import Truth

OUTCOMES = ("exact", "region", "unlocated", "missed", "misleading", "cannot say", "crashed")
"""Of a fault. `unlocated`: noticed, but no call or parameter is blamed, or only what inherits. Of a healthy pair: `quiet`, `alarm`."""
_RANDOM = ("dropout", "bernoulli", "rand", "multinomial", "normal_", "uniform_")


def judge_fault(answer: dict[str, Any], truth: Truth, parameters: tuple[str, ...]) -> str:
    """Return one of OUTCOMES."""
    if answer["answer"] == "crashed":
        return "crashed"
    if answer["answer"] in ("refused", "unmeasured") or answer["exit_code"] == 2:
        return "cannot say"
    if answer["exit_code"] == 0:
        return "missed"
    found = answer["divergence"]
    if found is None:
        return "unlocated"
    here = found["step"] == truth.step and found["rank"] in truth.ranks
    names = set(_names(found))
    if here and names & set(truth.calls):
        return "exact"
    if found["status"] not in ("introduced", "structural") and _names_parameter(answer, truth, parameters):
        return "exact"
    if here and names & set(truth.region):
        return "region"
    if here and any(set(_strings(value)) & set(truth.calls) for key, value in found.items() if "region" in key):
        return "region"
    return "misleading" if found["status"] in ("introduced", "structural") else "unlocated"


def same_place(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether both answers blame the same call for the same reason."""
    keys = ("step", "rank", "call", "candidate_call", "status")
    places = [answer.get("divergence") for answer in (one, other)]
    return all(places) and all(places[0][key] == places[1][key] for key in keys)


def judge_healthy(answer: dict[str, Any]) -> str:
    """Return quiet, alarm, cannot say or crashed. A random op that drew other numbers and is named as the cause is no alarm."""
    if answer["exit_code"] == 0:
        return "quiet"
    if answer["answer"] == "crashed":
        return "crashed"
    if answer["answer"] in ("refused", "unmeasured") or answer["exit_code"] == 2:
        return "cannot say"
    found = answer["divergence"]
    named = "" if found is None else found["call"] or found["candidate_call"]
    return "quiet" if any(word in named for word in _RANDOM) else "alarm"


def describe(answer: dict[str, Any]) -> str:
    """What was said, in one line."""
    if "text" in answer:
        return str(answer["text"]).replace("\n", " ")[-300:]
    found = answer["divergence"]
    line = f"{answer['answer']}, exit {answer['exit_code']}"
    if found is not None:
        row, finding = found["row"] or {}, found["finding"] or {}
        size = f", {row['judged_by']} {row['measured']} (allowed {row['allowed']})" if row else ""
        line += f": {found['status']} at step {found['step']} rank {found['rank']} {' / '.join(_names(found))}{size}"
        line += f" [{finding['kind']}]" if finding else ""
    outside = [f"{each['name']} before step {each['step']} {each['detail']}" for each in answer["externals"][:2]]
    return line + (f"; externals: {', '.join(outside)}" if outside else "")


def _names(found: dict[str, Any]) -> list[str]:
    names = [found["call"], found["candidate_call"], (found["finding"] or {}).get("call", "")]
    return list(dict.fromkeys(name for name in names if name))


def _names_parameter(answer: dict[str, Any], truth: Truth, parameters: tuple[str, ...]) -> bool:
    """Whether tensors of unknown origin are reported, and the first of them is one that really differs."""
    steps = (truth.step, truth.step + 1)
    named = [each["name"] for each in answer["externals"] if each["step"] in steps and each["rank"] in truth.ranks]
    return bool(named) and any(fnmatch(named[0], pattern) for pattern in parameters)


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _strings(each)
