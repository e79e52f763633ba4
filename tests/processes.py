"""Which tests start processes: found from what a test, its fixtures and the helpers they call refer to."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any

import pytest

_STARTERS = {"subprocess", "multiprocessing", "torch.multiprocessing", "tests.warm"}
_JOBS = {"jobs", "--jobs"}
"""Who gives a number of jobs starts workers."""
_OURS = ("tests.", "bench.")


def starts_process(item: pytest.Item) -> bool:
    """Whether a test, its fixtures or the helpers they call refer to a module that starts processes, or ask for jobs.

    A recorder does not count, unless the test looks for its process: in the quick loop it is a thread.
    """
    fixtures = item._fixtureinfo.name2fixturedefs.values()  # type: ignore[attr-defined]
    given = getattr(item, "callspec", None)
    called = [item.function, *(each.func for held in fixtures for each in held)]  # type: ignore[attr-defined]
    return any(_is_starter(thing) for thing in reachable([*called, *(given.params.values() if given else ())]))


def reachable(things: Iterable[Any]) -> Iterator[Any]:
    """Yield the things and what the functions and classes of the tests among them refer to, at any depth."""
    waiting, seen = list(things), set()
    while waiting:
        thing = waiting.pop()
        if id(thing) not in seen:
            seen.add(id(thing))
            yield thing
            waiting += _referred(thing)


def _is_starter(thing: Any) -> bool:
    if isinstance(thing, FunctionType) and thing.__module__.startswith(_OURS):
        return thing.__name__ == "recorders" or not _JOBS.isdisjoint(_words(thing.__code__))
    return (thing.__name__ if isinstance(thing, ModuleType) else getattr(thing, "__module__", None)) in _STARTERS


def _referred(thing: Any) -> Iterator[Any]:
    thing = inspect.unwrap(thing) if callable(thing) else thing
    if not str(getattr(thing, "__module__", "")).startswith(_OURS):
        return
    if getattr(thing, "__name__", "") == "assert_nothing_installed":  # after every test; it looks for recorders
        return
    if isinstance(thing, type):
        yield from vars(thing).values()
    if isinstance(thing, FunctionType):
        names = set(_names(thing.__code__))
        for name in names & thing.__globals__.keys():
            value = thing.__globals__[name]
            yield value
            if isinstance(value, ModuleType) and value.__name__.startswith(_OURS):
                yield from (vars(value)[inner] for inner in names & vars(value).keys())
        yield from (cell.cell_contents for cell in thing.__closure__ or ())


def _names(code: CodeType) -> Iterator[str]:
    """Yield every name that a piece of code uses, inner functions included."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _words(code: CodeType) -> Iterator[str]:
    """Yield the strings and the names of keywords in a piece of code."""
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _words(constant)
        elif isinstance(constant, (str, tuple)):
            yield from (
                each for each in ([constant] if isinstance(constant, str) else constant) if isinstance(each, str)
            )
