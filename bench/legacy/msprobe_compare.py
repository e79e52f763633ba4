"""Side by side: `msprobe compare` of tensorprobe and of the published peer, on the same dumps in msprobe's layout.

Every measurement is a whole process, from its start to its exit code; the two take turns, files are warm in the page cache.
The dumps are those of `bench.compare`: every tensor differs, one fault is planted. Checks that
each table has a row for every tensor and that ours fails at the planted call. `compare_part` gives the figures; run as a
script it prints them. A missed target is a result, not a failure.
"""

from __future__ import annotations

import argparse
import csv
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.compare.plan import SIZES, Dumps, describe_dumps
from bench.driver import PEER_PYTHON, describe_machine, environment, without_peer, words_of
from bench.processes import Finished, run_process, warm_pages

SIZES_SHOWN = ("large", "middle", "small-part", "summary-part")
TARGET = 20.0
OURS_EACH = 3
"""How often ours runs for each run of the peer beside it: it is short, and its figures scatter more."""
_FAULT = 0.01
"""The planted error is far above this, the noise everywhere else far below. (The rule of 2024 does not see a factor of 1.5.)"""
_OURS = [sys.executable, "-m", "msprobe"]


def compare_part(
    sizes: Sequence[str] = SIZES_SHOWN,
    *,
    repeats: int = 2,
    peer: bool = True,
    work: Path | None = None,
    time_limit: float = 600,
) -> list[dict[str, Any]]:
    """A case for each size: seconds of each run of `ours` and of `peer`, of the processor too, `ratio` of medians, `errors`."""
    place = (work or Path(tempfile.gettempdir()) / "tensorprobe-bench").resolve()
    place.mkdir(parents=True, exist_ok=True)
    return [_measure_size(name, place, repeats, peer, time_limit) for name in sizes]


def _measure_size(name: str, work: Path, repeats: int, peer: bool, time_limit: float) -> dict[str, Any]:
    dumps = describe_dumps(SIZES[name], work)
    # In a process of its own, so that the peak of this one, which the kernel hands down, stays small.
    subprocess.run(
        [sys.executable, "-m", "bench.compare.data", name, "--work", str(work), "--peer"], check=True, env=environment()
    )
    case: dict[str, Any] = {"size": name, "slots": dumps.slots, "pair_bytes": 2 * dumps.nbytes, "errors": []}
    case |= {"ours": [], "peer": [], "ours_cpu": [], "peer_cpu": [], "ours_peak_bytes": 0, "peer_peak_bytes": 0}
    try:
        for number in range(repeats):
            for tool in [*(["peer"] if peer else []), *["ours"] * OURS_EACH]:
                print(f"round {number + 1} of {repeats}: {name} {tool}", file=sys.stderr, flush=True)
                done, problem = _run(tool, dumps, work, time_limit)
                if problem:
                    case["errors"].append(f"{tool}: {problem}")
                    continue
                case[tool].append(done.wall_s)
                case[f"{tool}_cpu"].append(done.cpu_s)
                case[f"{tool}_peak_bytes"] = max(case[f"{tool}_peak_bytes"], done.peak_bytes)
    finally:
        shutil.rmtree(dumps.folder, ignore_errors=True)
    for end in ("", "_cpu"):
        ours, peers = case[f"ours{end}"], case[f"peer{end}"]
        case[f"ratio{end}"] = statistics.median(peers) / statistics.median(ours) if ours and peers else None
    return case


def _run(tool: str, dumps: Dumps, work: Path, time_limit: float) -> tuple[Finished, str]:
    """One process, and what is wrong with its answer."""
    with tempfile.TemporaryDirectory(prefix="msprobe-", dir=work) as own:
        warm_pages(dumps.folder / "peer")
        paths = [str(dumps.peer(side) / "dump.json") for side in ("candidate", "baseline")]
        command = [
            *(_OURS if tool == "ours" else [str(PEER_PYTHON.with_name("msprobe"))]),
            "compare",
            "-tp",
            paths[0],
            "-gp",
            paths[1],
            "-o",
            "out",
        ]
        done = run_process(command, Path(own), time_limit)
        tables = sorted(Path(own, "out").glob("compare_result*.csv"))
        if done.exit_code not in ((0, 1) if tool == "ours" else (0,)) or not tables:
            return done, f"exit {done.exit_code}: {''.join(done.stderr.splitlines()[-1:])}"
        with tables[-1].open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
    if len(rows) < dumps.slots:
        return done, f"{len(rows)} rows for {dumps.slots} tensors"
    row = next((row for row in rows if row["NPU Name"] == f"{dumps.planted}.output.0"), {})
    error = abs(float(row.get("MaxAbsErr") or row.get("Max diff") or 0))
    return done, "" if error > _FAULT else f"{dumps.planted}.output.0 has an error of {error}"


def render(cases: Sequence[dict[str, Any]]) -> str:
    """The figures as lines of text."""
    heads = ("ours s", "peer s", "times", "ours cpu s", "peer cpu s", "times")
    lines = [f"{'dumps':<14}{'pairs':>8}{'GB':>7}" + "".join(f"{head:>12}" for head in heads) + f"   target {TARGET:g}"]
    for case in cases:
        cells = f"{case['size']:<14}{case['slots']:>8,}{case['pair_bytes'] / 1e9:>7.2f}"
        for end in ("", "_cpu"):
            cells += "".join(f"{_median(case[f'{tool}{end}']):>12}" for tool in ("ours", "peer"))
            ratio = case[f"ratio{end}"]
            cells += f"{'-' if ratio is None else f'{ratio:.1f}':>12}"
        reached = "" if case["ratio"] is None else "reached" if case["ratio"] >= TARGET else "missed"
        lines += [f"{cells}   {reached}", *(f"  failed: {error}" for error in case["errors"])]
    return "\n".join(lines)


def _median(seconds: Sequence[float]) -> str:
    return f"{statistics.median(seconds):.2f}" if seconds else "-"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    known = [name for name in SIZES if SIZES[name].peer]
    parser.add_argument("--sizes", type=words_of("|".join(known)), default=list(SIZES_SHOWN), help=", ".join(known))
    parser.add_argument("--repeats", type=int, default=2, help="rounds")
    parser.add_argument("--no-peer", dest="peer", action="store_false", help="leave the published peer out")
    options = parser.parse_args()
    without_peer(options)
    machine = describe_machine()
    cases = compare_part(options.sizes, repeats=options.repeats, peer=options.peer)
    print(f"{machine['processor']}, {machine['cores']} cores, load {machine['load_at_start']:.1f} at the start")
    print(render(cases))
    return int(any(case["errors"] for case in cases))


if __name__ == "__main__":
    sys.exit(main())
