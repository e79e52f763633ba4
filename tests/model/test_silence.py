"""Nothing is warned of inside of `silent` by its thread, and nothing else changes."""

from __future__ import annotations

import threading
import warnings
from typing import Any

import pytest

from tensorprobe.model.silence import silent

REGISTRY: dict[Any, Any] = {}


def warn(text: str) -> None:
    warnings.warn_explicit(text, UserWarning, "program.py", 1, registry=REGISTRY)


def test_only_this_thread_is_silent_and_nothing_shown_is_forgotten() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        before = list(warnings.filters)
        warn("once")
        with silent():
            warn("hidden")
            other = threading.Thread(target=warn, args=("of another thread",))
            other.start()
            other.join()
        assert warnings.filters == before
        warn("once")  # was shown
        warn("after")
    assert [str(each.message) for each in caught] == ["once", "of another thread", "after"]


def test_a_copy_of_the_filters_taken_meanwhile_hides_nothing_later() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with pytest.raises(ZeroDivisionError), silent():
            copied = warnings.filters[:]
            raise ZeroDivisionError
        warnings.filters[:] = copied  # type: ignore[index]
        warn("after")
    assert [str(each.message) for each in caught] == ["after"]
