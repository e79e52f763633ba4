"""The run on disk: opening it, checking it, exporting it. `docs/format.md` is the specification.

Nothing here installs a hook, compares or judges; importing it imports neither torch nor numpy.
"""

from tensorprobe.record.check import Problem, Verification, verify_run
from tensorprobe.record.export import export_run
from tensorprobe.record.lines import Damage
from tensorprobe.record.reader import open_run
from tensorprobe.record.run import Run
from tensorprobe.record.stored import StoredCall, StoredSlot
from tensorprobe.registry import register_reader

__all__ = [
    "Damage",
    "Problem",
    "Run",
    "StoredCall",
    "StoredSlot",
    "Verification",
    "export_run",
    "open_run",
    "register_reader",
    "verify_run",
]
