"""Find the first op where two PyTorch runs part ways, and say why.

    with tensorprobe.capture("runs/a", model=model) as probe: ...     record a run
    run = tensorprobe.open_run("runs/a")                              read it
    result = tensorprobe.compare("runs/a", "runs/b")                  find where two runs part ways
    tensorprobe.assert_runs_agree("runs/a", "runs/b")                 the same as an assertion, for tests
    calls = tensorprobe.diff("runs/a", "runs/b", "Torch.add.0")       look at the tensors of a call in both
    result = tensorprobe.audit("runs/a")                              check what was recorded of each call in float64
    result = tensorprobe.precheck("runs/a", device="npu")             check each call of a run alone
    with tensorprobe.online(model, out="runs/online") as watch: ...   compare every ATen call with the CPU, while it runs
    result = tensorprobe.overflow("runs/a")                           find the first NaN or inf of a run
    with tensorprobe.overflow(model, out="runs/ovf") as watch: ...    the same, while the program runs
    tensorprobe.reference("mylib.op", fn)                             how the CPU computes an op that it has no kernel for
    tensorprobe.seed_all(1234)                                        fix every source of randomness

Names are loaded when they are first used: importing this package imports neither torch nor numpy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tensorprobe.lazy import lazy
from tensorprobe.registry import register_reader, register_writer
from tensorprobe.version import VERSION as __version__

if TYPE_CHECKING:
    from tensorprobe.checks import AuditResult, PrecheckResult, audit, precheck
    from tensorprobe.engine import Result, assert_runs_agree, compare, diff
    from tensorprobe.errors import CaptureIncomplete, TensorprobeError
    from tensorprobe.record import Run, open_run
    from tensorprobe.replay.references import reference
    from tensorprobe.taps import Probe, active_probe, capture, seed_all
    from tensorprobe.watches.online import online
    from tensorprobe.watches.overflow import overflow

_HOMES = {
    "AuditResult": "tensorprobe.checks",
    "CaptureIncomplete": "tensorprobe.errors",
    "PrecheckResult": "tensorprobe.checks",
    "Probe": "tensorprobe.taps",
    "Result": "tensorprobe.engine",
    "Run": "tensorprobe.record",
    "TensorprobeError": "tensorprobe.errors",
    "active_probe": "tensorprobe.taps",
    "assert_runs_agree": "tensorprobe.engine",
    "audit": "tensorprobe.checks",
    "capture": "tensorprobe.taps",
    "compare": "tensorprobe.engine",
    "diff": "tensorprobe.engine",
    "online": "tensorprobe.watches.online",
    "open_run": "tensorprobe.record",
    "overflow": "tensorprobe.watches.overflow",
    "precheck": "tensorprobe.checks",
    "reference": "tensorprobe.replay.references",
    "seed_all": "tensorprobe.taps",
}

__all__ = [
    "AuditResult",
    "CaptureIncomplete",
    "PrecheckResult",
    "Probe",
    "Result",
    "Run",
    "TensorprobeError",
    "__version__",
    "active_probe",
    "assert_runs_agree",
    "audit",
    "capture",
    "compare",
    "diff",
    "online",
    "open_run",
    "overflow",
    "precheck",
    "reference",
    "seed_all",
]

# What `open_run` reads besides folders of ours. The modules are imported when such a file or dump is met.
register_reader("sealed run", "tensorprobe.record.sealed:open_sealed", sign=r".*\.tpz", takes="the .tpz file itself")
register_reader(
    "ptdbg_ascend",
    "tensorprobe.legacy.layouts.ptdbg_reader:open_ptdbg",
    sign=r"(npu_dump|anonymous|api_stack_.*|.*_dump)\.pkl|ptdbg_dump_v.*",
    takes="its folder with rank0, rank1, …, the folder of one rank, or a .pkl",
)
register_reader(
    "api_accuracy_checker",
    "tensorprobe.legacy.layouts.checker_reader:open_checker",
    sign=r"(forward|backward|stack)_info_.*\.json",
    takes="a forward_info_{pid}.json, or the folder that holds one set of them",
)
register_reader(
    "msprobe",
    "tensorprobe.legacy.layouts.msprobe_reader:open_msprobe",
    sign=r"(dump|construct|stack)\.json",
    takes="its folder with step0, step1, …, the folder of one step or rank, or a dump.json",
)
register_writer("acl", "tensorprobe.legacy.layouts.dump_files:open_files")
register_writer("ptdbg", "tensorprobe.legacy.layouts.dump_files:open_files")
register_writer("msprobe", "tensorprobe.legacy.layouts.msprobe_writer:open_files")


__getattr__ = lazy(__name__, _HOMES)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
