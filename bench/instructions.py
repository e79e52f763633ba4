"""Instructions of one training step, plain and captured, counted by callgrind: the same on a busy machine as on an idle one.

    python -m bench.instructions --workload gpt-tiny

Only the training thread is counted. The recorder is another process, and a figure of its own. Needs valgrind with its
headers, and a C compiler. Takes some minutes: a step under callgrind is about a hundred times slower.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

TARGET = 1.8
_SWITCH = """
#include <valgrind/callgrind.h>
void start(void) { CALLGRIND_START_INSTRUMENTATION; CALLGRIND_ZERO_STATS; }
void stop(void) { CALLGRIND_DUMP_STATS; CALLGRIND_STOP_INSTRUMENTATION; }
"""


def _work(options: argparse.Namespace) -> None:
    """Run the workload, counting its last step only."""
    import torch

    from bench.workloads import build_named

    switch = ctypes.CDLL(options.switch)
    torch.set_num_threads(1)
    workload = build_named(options.workload)
    if options.foreach:
        workload.optimizer = torch.optim.AdamW(workload.model.parameters(), lr=1e-3, foreach=True)
    workload.step()
    probe = None
    if options.kind != "plain":
        import tensorprobe

        probe = tensorprobe.Probe(f"{options.folder}/{options.kind}", model=workload.model, mode=options.kind).start()
    for _ in range(2):
        workload.step()
        if probe is not None:
            probe.step()
    switch.start()
    workload.step()
    switch.stop()
    if probe is not None:
        probe.stop()


def count(kind: str, options: argparse.Namespace, folder: Path) -> int:
    """Return how many instructions the training thread needs for a step."""
    source, switch, out = folder / "switch.c", folder / "switch.so", folder / f"{kind}.out"
    if not switch.exists():
        source.write_text(_SWITCH)
        subprocess.run(["cc", "-shared", "-fPIC", source, "-o", switch], check=True)
    own = ["--worker", "--kind", kind, "--workload", options.workload, "--switch", str(switch), "--folder", str(folder)]
    tool = [
        "valgrind",
        "--tool=callgrind",
        "--instr-atstart=no",
        "--separate-threads=yes",
        f"--callgrind-out-file={out}",
    ]
    foreach = ["--foreach"] if options.foreach else []
    subprocess.run([*tool, sys.executable, "-m", "bench.instructions", *own, *foreach], check=True, capture_output=True)
    dumps = [
        re.search(r"^(?:summary|totals): (\d+)", path.read_text(), re.M) for path in folder.glob(f"{out.name}.1-01")
    ]
    return max(int(found[1]) for found in dumps if found)


def list_targets(report: dict[str, Any]) -> Iterator[tuple[str, str, str, bool]]:
    """Yield (what, target, measured, reached) for each way of capturing."""
    found = report["instructions"]
    for kind in (kind for kind in found if kind != "plain"):
        ratio = found[kind] / found["plain"]
        what = f"{report['workload']} {kind}: instructions of the training thread"
        yield what, f"≤ {TARGET}x plain", f"{ratio:.2f}x", ratio <= TARGET


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workload", default="gpt-tiny")
    parser.add_argument("--kinds", nargs="+", default=["plain", "tensor", "summary"])
    parser.add_argument("--foreach", action="store_true", help="AdamW on lists of tensors")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    for hidden in ("--kind", "--switch", "--folder"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path, help="where to write the figures too, as JSON")
    options = parser.parse_args()
    if options.worker:
        _work(options)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        found = {kind: count(kind, options, Path(folder)) for kind in options.kinds}
    plain = found.get("plain")
    for kind, number in found.items():
        ratio = "" if plain is None or kind == "plain" else f"   {number / plain:.2f}x plain (target {TARGET}x)"
        print(f"{options.workload:10} {kind:10} {number / 1e6:8.1f} million instructions{ratio}")
    report = json.dumps({"workload": options.workload, "instructions": found})
    if options.output is not None:
        options.output.write_text(report)
    print(report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
