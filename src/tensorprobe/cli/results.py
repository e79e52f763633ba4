"""What a path holds: the result of a command, or a run; and its page."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from tensorprobe.errors import SettingsError
from tensorprobe.files import read_file
from tensorprobe.standard_json import decode
from tensorprobe.text import shell

if TYPE_CHECKING:
    from tensorprobe.report.page.data import Page

_SUMMARY, _ONLINE = "summary.json", "online.json"


def open_result(path: Path) -> Any:
    """Return what a folder holds, or a file of it: a Result, PrecheckResult, AuditResult, OverflowResult, OnlineResult or Run."""
    folder = folder_of(path)
    if (folder / _SUMMARY).is_file():
        return _summary(folder)
    if (folder / _ONLINE).is_file():
        from tensorprobe.model.online import OnlineResult

        return decode(read_file(folder / _ONLINE), OnlineResult, what="an online comparison")
    if folder.is_dir() and any(folder.glob("overflow.rank*.json")):
        from tensorprobe.watches.overflow.recorded import find_overflow

        return find_overflow(folder)
    from tensorprobe.record.reader import open_run

    return open_run(path)


def folder_of(path: Path) -> Path:
    """Return the folder of a result: that of one of its files, or that of the only rank of an online compare."""
    if path.name in (_SUMMARY, _ONLINE, "report.html"):
        return path.parent
    ranks = sorted(found.parent for found in path.glob(f"rank*/{_ONLINE}")) if path.is_dir() else []
    if len(ranks) > 1:
        names = ", ".join(rank.name for rank in ranks[:8])
        raise SettingsError(f"'{path}' holds the results of {len(ranks):,} ranks: {names}. Pass one: {shell(ranks[0])}")
    return ranks[0] if ranks else path


def is_result(path: Path) -> bool:
    """Return whether a folder holds the result of a command, and not a run."""
    return any((path / name).is_file() for name in (_SUMMARY, _ONLINE)) or (
        path.is_dir()
        and not (path / "manifest.json").exists()
        and any(any(path.glob(name)) for name in ("overflow.rank*.json", f"rank*/{_ONLINE}"))
    )


def _summary(folder: Path) -> Any:
    from tensorprobe.checks.result import AuditResult, PrecheckResult
    from tensorprobe.engine.output import read_result
    from tensorprobe.model.diff import CallEvidence
    from tensorprobe.model.precheck import Audit, Precheck

    content = read_file(folder / _SUMMARY)
    try:
        keys = set(msgspec.json.decode(content, type=dict[str, msgspec.Raw]))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise SettingsError(f"'{folder / _SUMMARY}' is no result of tensorprobe: {error}.") from None
    if "checks" not in keys:
        return read_result(folder)
    held = read_file(folder / "evidence.json") if (folder / "evidence.json").is_file() else b"[]"
    evidence = decode(held, list[CallEvidence], what="the evidence of a precheck")
    if "losses" in keys:
        return AuditResult(decode(content, Audit, what="an audit"), evidence=evidence)
    return PrecheckResult(decode(content, Precheck, what="a precheck"), evidence=evidence)


def page_of(held: Any, *, full: bool = False, source: bool = True, rows: bool = True) -> Page:
    """Return the page of whatever `open_result` returns. Without `rows`, the rows of a comparison are left to a server."""
    from tensorprobe.record.run import Run
    from tensorprobe.report.page import files

    if not isinstance(held, Run):
        return files.page_of(held, full=full, source=source, rows=rows)
    from tensorprobe.record.overview import describe_run
    from tensorprobe.report.page.run import CallAt, run_page

    calls = (CallAt(call.model, call.step, call.rank, call.index) for call in held.calls(on_damage="skip"))
    return run_page(describe_run(held), calls, full=full, source=source)
