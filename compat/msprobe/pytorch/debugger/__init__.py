"""`PrecisionDebugger`: when and where a program is dumped, as msprobe's scripts say it."""

from tensorprobe.legacy.msprobe.debugger import PrecisionDebugger, module_dump, module_dump_end

__all__ = ["PrecisionDebugger", "module_dump", "module_dump_end"]
