"""How long opening a run of 100,000 calls takes, until the name of every call is known. Prints it, or writes it as JSON."""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.compare.plan import SIZES, describe_dumps
from bench.driver import environment
from tensorprobe.record import open_run

TARGET_S = 0.05


def open_once(path: Path) -> tuple[float, int]:
    """Return the seconds that opening takes, and how many calls there are."""
    start = time.perf_counter()
    run = open_run(path)
    (place,) = run.segments()
    calls = len(run.segment(*place).index().entries)
    return time.perf_counter() - start, calls


def list_targets(report: dict[str, Any]) -> Iterator[tuple[str, str, str, bool]]:
    """Yield (what, target, measured, reached)."""
    seconds = min(report["seconds"])
    yield f"opening {report['calls']:,} calls", f"≤ {TARGET_S} s", f"{seconds:.3f} s", seconds <= TARGET_S


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "tensorprobe-bench")
    parser.add_argument("--keep", action="store_true", help="leave the dumps for bench.compare")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    dumps = describe_dumps(SIZES["summary"], options.work)
    maker = [sys.executable, "-m", "bench.compare.data", "summary", "--work", str(options.work), "--no-peer"]
    try:
        subprocess.run(maker, check=True, env=environment())
        found = [open_once(dumps.ours("baseline")) for _ in range(options.repeats)]
    finally:
        if not options.keep:
            shutil.rmtree(dumps.folder, ignore_errors=True)
    report = {"calls": found[0][1], "seconds": [seconds for seconds, _ in found]}
    if options.output is not None:
        options.output.write_text(json.dumps(report))
    print(*(" ".join(map(str, line)) for line in list_targets(report)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
