"""Globs and regular expressions over names, matched in time proportional to their length, whatever they say.

In: a pattern from a file that nobody vouches for. Out: how much of a name it matches, and what its groups hold. All states of
the pattern are followed at once, so there is no going back and no pattern that takes exponential time.

A glob has `*` for text without a dot, `**` for any text, `?` for one character that is no dot. A regular expression may have
characters, `.`, classes such as `[a-z]`, `[^.]`, `\\d`, `\\w`, groups, `|`, and `*`, `+`, `?`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

Accepts = Callable[[str], object]
MAX_PATTERN = 500
"""The maximum length of a pattern in characters."""
_CLASSES = {"d": "[0-9]", "w": "[0-9A-Za-z_]", "D": "[^0-9]", "W": "[^0-9A-Za-z_]"}


class PatternError(ValueError):
    """A pattern that cannot be read, with the reason."""


class _Step(NamedTuple):
    """One step of a program: accept a character, or note a position in `save`, or go on at each of `to` in turn."""

    accepts: Accepts | None = None
    save: int = -1
    to: tuple[int, ...] = ()


_Program = list[_Step]
"""Targets are relative to the step; the end is behind the last one."""


class Pattern:
    """A compiled pattern."""

    def __init__(self, expression: str) -> None:
        if len(expression) > MAX_PATTERN:
            raise PatternError(f"it has {len(expression):,} characters; at most {MAX_PATTERN} are read")
        parser = _Parser(expression)
        self._steps = parser.parse()
        self.groups = parser.groups

    def match_beginning(self, name: str) -> tuple[int, tuple[str, ...]] | None:
        """Return where the longest matching beginning of a name ends, at a dot or at the end, and its groups; None if none matches."""
        best = None
        threads = self._follow([(0, (0,) * (2 * self.groups))], 0)
        for at in range(len(name) + 1):
            ended = next((saved for step, saved in threads if step == len(self._steps)), None)
            if ended is not None and (at == len(name) or name[at] == "."):
                best = at, tuple(name[ended[2 * each] : ended[2 * each + 1]] for each in range(self.groups))
            if at == len(name) or not threads:
                break
            accepted = []
            for step, saved in threads:
                accepts = self._steps[step].accepts if step < len(self._steps) else None
                if accepts is not None and accepts(name[at]):
                    accepted.append((step + 1, saved))
            threads = self._follow(accepted, at + 1)
        return best

    def _follow(self, states: list[tuple[int, tuple[int, ...]]], at: int) -> list[tuple[int, tuple[int, ...]]]:
        """Return the steps that accept characters, or the end, that are reached from these; each once, the preferred first."""
        seen: set[int] = set()
        reached = []
        waiting = states[::-1]
        while waiting:
            number, saved = waiting.pop()
            if number in seen:
                continue
            seen.add(number)
            step = self._steps[number] if number < len(self._steps) else _Step(accepts=bool)
            if step.accepts is not None:
                reached.append((number, saved))
            elif step.save >= 0:
                waiting.append((number + 1, (*saved[: step.save], at, *saved[step.save + 1 :])))
            else:
                waiting += [(number + to, saved) for to in reversed(step.to)]
        return reached


class _Parser:
    """Recursive descent over an expression; groups nest as deep as a pattern is long, and no deeper than Python allows."""

    def __init__(self, text: str) -> None:
        self._text, self._at, self.groups, self._depth = text, 0, 0, 0

    def parse(self) -> _Program:
        program = self._alternatives()
        if self._at < len(self._text):
            raise PatternError(f"there is a ')' too many at character {self._at + 1}")
        return program

    def _peek(self) -> str:
        return self._text[self._at : self._at + 1]

    def _alternatives(self) -> _Program:
        program = self._sequence()
        if self._peek() != "|":
            return program
        self._at += 1
        other = self._alternatives()
        return [_Step(to=(1, len(program) + 2)), *program, _Step(to=(len(other) + 1,)), *other]

    def _sequence(self) -> _Program:
        program: _Program = []
        while self._peek() not in ("", "|", ")"):
            program += self._repeated(self._atom())
        return program

    def _repeated(self, atom: _Program) -> _Program:
        sign, size = self._peek(), len(atom)
        if sign not in ("*", "+", "?"):
            return atom
        self._at += 1
        if self._peek() in ("*", "+", "?"):
            raise PatternError(f"'{sign}{self._peek()}' is not supported")
        if sign == "?":
            return [_Step(to=(1, size + 1)), *atom]
        again = [*atom, _Step(to=(-size, 1))]
        return again if sign == "+" else [_Step(to=(1, size + 2)), *again]

    def _atom(self) -> _Program:
        sign = self._peek()
        if sign == "(":
            return self._group()
        if sign in ("*", "+", "?", "{", "}", "^", "$"):
            raise PatternError(f"'{sign}' at character {self._at + 1} is not supported there")
        # Python's own expressions match one character here, so nothing can repeat.
        found = re.compile(r"\\.|\[\^?\]?(?:[^\]\\]|\\.)*\]|[^\\\[]", re.DOTALL).match(self._text, self._at)
        if found is None:
            raise PatternError(f"'{sign}' at character {self._at + 1} has no end")
        self._at = found.end()
        written = found[0]
        if written[0] == "\\":
            if written[1].isalnum() and written[1] not in _CLASSES:
                raise PatternError(f"'{written}' is not supported; \\d and \\w are")
            written = _CLASSES.get(written[1], re.escape(written[1]))
        elif len(written) == 1 and written != ".":
            return [_Step(accepts=written.__eq__)]
        try:
            return [_Step(accepts=re.compile(written, re.DOTALL).fullmatch)]
        except re.error as wrong:
            raise PatternError(f"{written!r} is no class of characters: {wrong}") from None

    def _group(self) -> _Program:
        self._at += 1
        keeps = not self._text.startswith("?:", self._at)
        if not keeps:
            self._at += 2
        elif self._peek() == "?":
            raise PatternError(f"'(?' at character {self._at} is supported as '(?:' only")
        number = self.groups
        self.groups += keeps
        self._depth += 1
        if self._depth > 50:
            raise PatternError("groups are nested more than 50 deep")
        inside = self._alternatives()
        self._depth -= 1
        if self._peek() != ")":
            raise PatternError("a ')' is missing")
        self._at += 1
        return [_Step(save=2 * number), *inside, _Step(save=2 * number + 1)] if keeps else inside


def expression_of(glob: str) -> str:
    """Return the regular expression of a glob, with a group for each wildcard."""
    return "".join(
        {"**": "(.*)", "*": "([^.]*)", "?": "([^.])"}.get(part) or re.escape(part) for part in parts_of(glob)
    )


def wildcards_of(glob: str) -> list[str]:
    """Return the wildcards of a glob, in order."""
    return [part for part in parts_of(glob) if part in ("*", "**", "?")]


def parts_of(glob: str) -> list[str]:
    """Return a glob in parts: wildcards, and the text between them."""
    return [part for part in re.split(r"(\*\*|\*|\?)", glob) if part]


def references_of(template: str) -> Iterator[str | int]:
    """Yield the text of a template and, for `\\1`, the number of a group."""
    for part in re.split(r"(\\[1-9])", template):
        if part:
            yield int(part[1]) if part[0] == "\\" and len(part) == 2 else part
