"""Checks each call of a run by itself: on the device and on a reference of higher precision, forward and backward.

Calls run in processes of their own: one that kills its process, or never ends, is a result of that call.
"""

from typing import TYPE_CHECKING

from tensorprobe.lazy import lazy

if TYPE_CHECKING:
    from tensorprobe.checks.result import PrecheckResult
    from tensorprobe.checks.runner import precheck

__all__ = ["PrecheckResult", "precheck"]

__getattr__ = lazy(__name__, {"PrecheckResult": "tensorprobe.checks.result", "precheck": "tensorprobe.checks.runner"})
