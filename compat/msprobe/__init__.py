"""The names of msprobe, for scripts that were written for it. Everything is done by tensorprobe.

    from msprobe.pytorch import PrecisionDebugger, seed_all, compare

docs/migrating.md says what each of them is here, and what tensorprobe can do beyond it.
"""

from pathlib import Path

from tensorprobe.legacy.msprobe import take_over

take_over(list_of_apis=Path(__file__).parent / "pytorch" / "hook_module" / "support_wrap_ops.yaml")
