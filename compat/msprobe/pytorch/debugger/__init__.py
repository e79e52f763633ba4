"""`PrecisionDebugger`: when and where a program is dumped, as msprobe's scripts say it."""

from __future__ import annotations

from msprobe.pytorch.debugger.precision_debugger import PrecisionDebugger, module_dump, module_dump_end

__all__ = ["PrecisionDebugger", "module_dump", "module_dump_end"]
