"""The names of ptdbg_ascend, for scripts that were written for it. Everything is done by tensorprobe.

    from ptdbg_ascend import *

docs/migrating.md says what each of them is here, and what tensorprobe can do beyond it.
"""

from __future__ import annotations

from ptdbg_ascend.comparing import compare
from ptdbg_ascend.distributed import compare_distributed
from ptdbg_ascend.dump import (
    VERSION as __version__,
)
from ptdbg_ascend.dump import (
    acc_cmp_dump,
    overflow_check,
    register_hook,
    set_backward_input,
    set_dump_path,
    set_dump_switch,
    set_overflow_check_switch,
)
from ptdbg_ascend.parsing import parse
from tensorprobe.taps import seed_all

__all__ = [
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
