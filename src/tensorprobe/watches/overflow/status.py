"""The overflow register of an accelerator, where its package offers one: it tells of overflows that no value shows.

torch_npu has two spellings of the same two functions. Nothing is imported: only a package that the program uses is asked.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import reduce
from typing import Any, NamedTuple

_SPELLINGS = (
    ("npu.utils.get_npu_overflow_flag", "npu.utils.clear_npu_overflow_flag"),
    ("npu.get_npu_overflow_flag", "npu.clear_npu_overflow_flag"),
    ("_C._check_overflow_npu", "_C._clear_overflow_npu"),
)


class Status(NamedTuple):
    """The two questions to the register."""

    is_raised: Callable[[], bool]
    clear: Callable[[], None]


def find_status() -> Status | None:
    """The register of the accelerator in use; None where there is none, or where it does not answer."""
    package = sys.modules.get("torch_npu")
    if package is None:
        return None
    for names in _SPELLINGS:
        try:
            asked, cleared = (_find(package, name) for name in names)
            cleared()
            asked()
        except (AttributeError, RuntimeError):  # a device that is absent, or busy with another process
            continue
        return Status(asked, cleared)
    return None


def _find(package: Any, name: str) -> Any:
    return reduce(getattr, name.split("."), package)
