"""Checks each call of a run by itself: on the device and on a reference of higher precision, forward and backward.

Calling `tensorprobe.precheck(...)` checks a run. Calls run in processes of their own: one that kills its process, or never
ends, is a result of that call.
"""

from tensorprobe.precheck.result import PrecheckResult
from tensorprobe.precheck.runner import precheck
from tensorprobe.rooms import make_callable

__all__ = ["PrecheckResult", "precheck"]

make_callable(__name__, precheck)
