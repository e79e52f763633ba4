"""The names of msprobe, for scripts that were written for it. Everything is done by tensorprobe.

    from msprobe.pytorch import PrecisionDebugger, seed_all, compare

docs/migrating.md says what each of them is here, and what tensorprobe can do beyond it.
"""

from pathlib import Path
from typing import Any

from tensorprobe.legacy.msprobe import take_over

take_over(list_of_apis=Path(__file__).parent / "pytorch" / "hook_module" / "support_wrap_ops.yaml")

__all__ = ["GradComparator"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from tensorprobe.legacy.msprobe.grad_probe import GradComparator

    return GradComparator
