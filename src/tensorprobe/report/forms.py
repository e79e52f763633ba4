"""Every form of output in one table: name → the function that makes it, for each kind of result.

A new form is one file with its function, and one line here. A printed form is a function `(summary, *, limit, ...) -> str`;
a form that is always a file is a function `(result, path)`. The modules are imported when a form is used.
"""

from __future__ import annotations

import os
import tempfile
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from tensorprobe.errors import SettingsError, did_you_mean
from tensorprobe.files import replace_file
from tensorprobe.standard_json import encode
from tensorprobe.text import plain

if TYPE_CHECKING:
    from tensorprobe.report.notebook import Frame


class Form(NamedTuple):
    """One form: whether it is always a file, and its function, as `module:function`, for each kind of summary."""

    is_file: bool
    functions: dict[str, str]


_ANY = "*"
FORMS: dict[str, Form] = {
    "text": Form(
        False,
        {
            "Comparison": "tensorprobe.report.compare_text:render_comparison",
            "Precheck": "tensorprobe.report.precheck_text:render_precheck",
            "Audit": "tensorprobe.report.audit_text:render_audit",
            "OverflowReport": "tensorprobe.report.overflow_text:render_overflow",
            "OnlineResult": "tensorprobe.report.online_text:render_online",
            "Search": "tensorprobe.report.find_text:render_search",
        },
    ),
    "json": Form(False, {_ANY: "tensorprobe.report.forms:render_json"}),
    "md": Form(False, {"Comparison": "tensorprobe.report.markdown:render_markdown"}),
    "junit": Form(
        False,
        {
            "Comparison": "tensorprobe.report.junit:render_junit",
            "Audit": "tensorprobe.report.audit_text:render_audit_junit",
        },
    ),
    "github": Form(False, {"Comparison": "tensorprobe.report.github:render_github"}),
    "csv": Form(
        True,
        {
            "Comparison": "tensorprobe.report.table:write_csv",
            "Precheck": "tensorprobe.report.precheck_tables:write_csv",
            "Audit": "tensorprobe.report.precheck_tables:write_csv",
        },
    ),
    "parquet": Form(
        True,
        {
            "Comparison": "tensorprobe.report.table:write_parquet",
            "Audit": "tensorprobe.report.precheck_tables:write_parquet",
        },
    ),
    "xlsx": Form(True, {"Comparison": "tensorprobe.report.xlsx:write_workbook"}),
    "html": Form(
        True,
        dict.fromkeys(
            ("Comparison", "Precheck", "Audit", "OverflowReport"), "tensorprobe.report.page.files:write_page"
        ),
    ),
}


class Wanted(NamedTuple):
    """One `NAME[=FILE]`."""

    name: str
    file: Path | None


class Answer:
    """The result of compare, precheck and overflow. True only if `exit_code` is 0. `print` shows what the command prints."""

    def __init__(self, summary: Any, **extra: Any) -> None:
        self.summary = summary
        self._extra = extra

    @property
    def exit_code(self) -> int:
        """0: no problem. 1: something was found. 2: nothing could be checked."""
        return int(self.summary.exit_code)

    def __bool__(self) -> bool:
        return self.exit_code == 0

    def render(self, form: str = "text", *, limit: int = 10) -> str:
        """Return the result in a printed form of `FORMS`: text, json, or another that this kind of result has."""
        return render(self.summary, form, limit=limit, **(self._extra if form == "text" else {}))

    def save(self, path: str | os.PathLike[str], form: str, *, limit: int = 10) -> None:
        """Write the result to a file in any form. SettingsError when the file cannot be written."""
        target = Path(path)
        try:
            if find(form, self.summary).is_file:
                function_for(form, self.summary)(self, target)
            else:
                replace_file(target, self.render(form, limit=limit).rstrip("\n").encode() + b"\n")
        except OSError as error:
            raise SettingsError(f"cannot write {plain(target)!r}: {error.strerror}.") from None

    def to_json(self) -> str:
        """Return the summary as standard JSON; its schema is shipped with the package."""
        return encode(self.summary)

    def to_dict(self) -> dict[str, Any]:
        """Return the summary as plain dicts and lists."""
        held: dict[str, Any] = msgspec.to_builtins(self.summary)
        return held

    def __str__(self) -> str:
        return self.render()

    def _repr_html_(self) -> str:
        from tensorprobe.report.notebook import card

        return card(str(self), self.exit_code)

    def show(self, *, height: int = 800) -> Frame:
        """Return the page of this result, for the last line of a notebook's cell."""
        from tensorprobe.report.notebook import Frame

        with tempfile.TemporaryDirectory() as folder:
            self.save(Path(folder) / "report.html", "html")
            return Frame((Path(folder) / "report.html").read_text(encoding="utf-8"), height)


def render(summary: object, form: str = "text", *, limit: int = 10, **extra: Any) -> str:
    """Return a summary in a printed form. `extra` is what only some results have, such as saved scripts."""
    text: str = function_for(form, summary)(summary, limit=limit, **extra)
    return text


def render_json(summary: object, *, limit: int = 10, **extra: Any) -> str:
    """Return the whole summary, whatever the limit, as standard JSON."""
    return encode(summary)


def find(name: str, summary: object) -> Form:
    """Return the form of that name. SettingsError when there is none, or none for this kind of summary (or its type)."""
    if name not in FORMS:
        raise SettingsError(f"unknown format {name!r}; expected {names_for(summary)}.{did_you_mean(name, FORMS)}")
    if not {_kind(summary), _ANY} & set(FORMS[name].functions):
        raise SettingsError(f"format {name!r} is not available here; expected {names_for(summary)}.")
    return FORMS[name]


def function_for(name: str, summary: object) -> Any:
    """Return the function that makes that form of that summary."""
    functions = find(name, summary).functions
    module, _, function = functions.get(_kind(summary), functions.get(_ANY, "")).partition(":")
    return getattr(import_module(module), function)


def names_for(summary: object, files: tuple[bool, ...] = (False, True)) -> str:
    """Return the names of the forms for a kind of summary, as a list in words: printed ones, files, or both."""
    fitting = {name: form for name, form in FORMS.items() if {_kind(summary), _ANY} & set(form.functions)}
    *names, last = [name for name, form in fitting.items() if form.is_file in files] or [""]
    return f"{', '.join(names)} or {last}" if names else last


def parse_forms(given: list[str], summary: object) -> list[Wanted]:
    """Return what `--format NAME[=FILE]` asks for. SettingsError for a form that does not exist or cannot be written."""
    wanted = []
    for text in given:
        name, equals, file = text.partition("=")
        find(name, summary)
        if equals and not file:
            raise SettingsError(f"--format {plain(text)}: the file is missing after '='.")
        if file and not Path(file).absolute().parent.is_dir():
            raise SettingsError(f"--format {plain(text)}: there is no folder {plain(Path(file).parent)!r}.")
        wanted.append(Wanted(name, Path(file) if file else None))
    printed = [each.name for each in wanted if each.file is None and not FORMS[each.name].is_file]
    if len(printed) > 1:
        raise SettingsError(
            f"only one format can be printed, got {', '.join(printed)}. Write the others to files: "
            f"--format {printed[-1]}=FILE."
        )
    return wanted


def _kind(summary: object) -> str:
    return (summary if isinstance(summary, type) else type(summary)).__name__
