"""The names of ptdbg_ascend, for scripts that were written for it. Everything is done by tensorprobe.

    from ptdbg_ascend import *

docs/migrating.md says what each of them is here, and what tensorprobe can do beyond it.
"""

from __future__ import annotations

from tensorprobe.legacy.msprobe import seed_all
from tensorprobe.legacy.ptdbg.compare import compare, compare_distributed
from tensorprobe.legacy.ptdbg.debugger import PrecisionDebugger
from tensorprobe.legacy.ptdbg.dump import VERSION as __version__
from tensorprobe.legacy.ptdbg.dump import (
    acc_cmp_dump,
    overflow_check,
    register_hook,
    set_backward_input,
    set_dump_path,
    set_dump_switch,
    set_overflow_check_switch,
)
from tensorprobe.legacy.ptdbg.parsing import parse

__all__ = [
    "PrecisionDebugger",
    "__version__",
    "acc_cmp_dump",
    "compare",
    "compare_distributed",
    "overflow_check",
    "parse",
    "register_hook",
    "seed_all",
    "set_backward_input",
    "set_dump_path",
    "set_dump_switch",
    "set_overflow_check_switch",
]

seed_all()  # as the older package did: its users compare runs that they never seeded themselves
