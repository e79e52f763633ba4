"""Checks each call of a run by itself: what a device makes of it (precheck), or what was recorded of it (audit).

Calls run in processes of their own: one that kills its process, or never ends, is a result of that call.
"""

from typing import TYPE_CHECKING

from tensorprobe.lazy import lazy

if TYPE_CHECKING:
    from tensorprobe.checks.result import AuditResult, PrecheckResult
    from tensorprobe.checks.runner import audit, precheck

__all__ = ["AuditResult", "PrecheckResult", "audit", "precheck"]

_HOMES = {
    "AuditResult": "tensorprobe.checks.result",
    "PrecheckResult": "tensorprobe.checks.result",
    "audit": "tensorprobe.checks.runner",
    "precheck": "tensorprobe.checks.runner",
}
__getattr__ = lazy(__name__, _HOMES)
