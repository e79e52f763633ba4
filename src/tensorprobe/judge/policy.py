"""Policies: tables of rules that say what is allowed. The first matching rule decides on a row.

A rule either lists conditions (`diverges`: a group in which every figure exceeds its limit), or gives the
allowed multiple of the noise that arithmetic explains (`noise`), or ignores the row (`ignore`).
"""

from __future__ import annotations

import math
import re
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import msgspec

from tensorprobe.errors import SettingsError, did_you_mean
from tensorprobe.files import read_toml
from tensorprobe.model.measured import JUDGED


class Rule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which rows it applies to, and what is allowed. Names may contain `*` and `?`; omitted keys match everything."""

    call: str = "*"
    op: str = "*"
    slot: str = "*"
    dtype: str = "*"
    module: str = "*"
    noise: float | None = None
    """The row diverges if an error exceeds `noise` times what rounding and the inputs explain."""
    diverges: list[dict[str, float]] = []
    ignore: bool = False

    @property
    def selects(self) -> str:
        """Which rows it applies to, in words: `call = "Functional.gelu*", dtype = "bfloat16"`."""
        fields = {"call": self.call, "op": self.op, "slot": self.slot, "dtype": self.dtype, "module": self.module}
        return ", ".join(f'{key} = "{value}"' for key, value in fields.items() if value != "*")

    @property
    def fits_all(self) -> bool:
        """Whether the rule matches every row."""
        return {self.call, self.op, self.slot, self.dtype, self.module} == {"*"}

    def fits(self, call: str, op: str, slot: str, dtype: str, module: str) -> bool:
        """Return whether the rule matches such a row."""
        return (
            fnmatchcase(call, self.call)
            and fnmatchcase(op, self.op)
            and fnmatchcase(slot, self.slot)
            and fnmatchcase(dtype, self.dtype)
            and fnmatchcase(module, self.module)
        )


class Policy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A named list of rules."""

    name: str
    rules: list[Rule]


_NONFINITE = {"nonfinite_different": 0.0}

POLICIES: dict[str, Policy] = {
    policy.name: policy
    for policy in (
        Policy(name="noise-aware", rules=[Rule(noise=1.0)]),
        Policy(name="bitwise", rules=[Rule(diverges=[{"bit_identical": 0.0}, _NONFINITE])]),
        Policy(name="seed-2023", rules=[Rule(diverges=[{"one_minus_cosine": 0.01, "max_abs": 0.001}, _NONFINITE])]),
        Policy(
            name="seed-2024",
            rules=[
                Rule(
                    diverges=[
                        {"one_minus_cosine": 0.01, "max_abs": 0.001},
                        {"one_minus_cosine": 0.1},
                        {"max_abs": 1.0},
                        _NONFINITE,
                    ]
                )
            ],
        ),
    )
}


class _File(msgspec.Struct, forbid_unknown_fields=True):
    """A policy file: its own rules, then those of `base`."""

    name: str | None = None
    base: str = "noise-aware"
    rule: list[Rule] = []


def load_policy(text: str) -> Policy:
    """Return a policy by its name, or from a TOML file. Raises SettingsError with the mistake and its place."""
    if text in POLICIES:
        return POLICIES[text]
    path = Path(text)
    if path.suffix != ".toml":
        raise SettingsError(
            f"unknown policy {text!r}.{did_you_mean(text, POLICIES)}\n"
            f"  Expected {', '.join(POLICIES)}, or the path of a .toml file with rules."
        )
    file = _read_file(path)
    if file.base not in POLICIES:
        raise SettingsError(f"{path}: unknown base {file.base!r}.{did_you_mean(file.base, POLICIES)}")
    for number, rule in enumerate(file.rule, start=1):
        _check(rule, f"{path}, rule {number}")
    return Policy(name=file.name or path.stem, rules=[*file.rule, *POLICIES[file.base].rules])


def _read_file(path: Path) -> _File:
    """Return the file, checked key by key. The error names the rule and the nearest known key."""
    try:
        content = read_toml(path)
    except FileNotFoundError:
        raise SettingsError(f"there is no policy file '{path}'.") from None
    except OSError as error:
        raise SettingsError(f"cannot read the policy file '{path}': {error.strerror or error}.") from None
    except ValueError as wrong:
        raise SettingsError(f"{path}: this is not TOML: {wrong}.") from None
    rules = content.get("rule")
    tables: list[tuple[str, Any, type[msgspec.Struct]]] = [(f"{path}", content, _File)]
    if isinstance(rules, list):
        tables += [(f"{path}, rule {number}", rule, Rule) for number, rule in enumerate(rules, start=1)]
    for where, table, kind in tables:
        known = kind.__struct_fields__
        for key in table if isinstance(table, dict) else ():
            if key not in known:
                near = did_you_mean(key, known).replace(" Did", "; did") or f"; expected {', '.join(known)}."
                raise SettingsError(f"{where}: unknown key {key!r}{near}")
    try:
        return msgspec.convert(content, _File)
    except (msgspec.ValidationError, RecursionError) as wrong:
        at = re.search(r" - at `\$\.rule\[(\d+)\](?:\.(\w+))?.*`$", str(wrong))
        where = f"{path}, rule {int(at[1]) + 1}" + (f", {at[2]}" if at[2] else "") if at else f"{path}"
        fact = str(wrong)[: at.start()] if at else str(wrong)
        raise SettingsError(f"{where}: {fact[:1].lower()}{fact[1:].replace('`', '')}.") from None


def check_policy(policy: Policy) -> None:
    """Raise SettingsError for an invalid rule in a policy made by a program."""
    for number, rule in enumerate(policy.rules, start=1):
        _check(rule, f"rule {number} of policy {policy.name!r}")


def _check(rule: Rule, where: str) -> None:
    kinds = (rule.noise is not None) + bool(rule.diverges) + rule.ignore
    if kinds != 1:
        raise SettingsError(f"{where} needs exactly one of noise, diverges, ignore; it has {kinds}.")
    if rule.noise is not None and not 0 < rule.noise < math.inf:
        raise SettingsError(
            f"{where}: noise is {rule.noise}; expected a number greater than 0. To judge nothing, set ignore = true."
        )
    known = JUDGED[1:]
    for group in rule.diverges:
        for figure, limit in group.items():
            if figure not in known:
                raise SettingsError(f"{where}: unknown figure {figure!r}.{did_you_mean(figure, known)}")
            _check_limit(figure, limit, where)
        if not group:
            raise SettingsError(f"{where}: a condition without a figure matches every row.")


def _check_limit(figure: str, limit: float, where: str) -> None:
    """Reject a limit that every value or no value exceeds."""
    if not math.isfinite(limit):
        raise SettingsError(
            f"{where}: the limit of {figure} is {limit}, which no figure exceeds. To judge nothing, set ignore = true."
        )
    if limit < 0:
        raise SettingsError(
            f"{where}: the limit of {figure} is {limit}; figures are never below 0, so all would diverge."
        )
