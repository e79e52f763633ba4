"""Planted faults, healthy pairs, and different programs of one model, on families that nobody has tuned on.

    python -m bench.heldout --part open                              the part that may be read and used for tuning
    python -m bench.heldout --part closed --jobs 2                   the other: prints counts only
    python -m bench.heldout --part open --sample 25                  a quarter of the cases, the same ones each time
    python -m bench.heldout --part open --kinds norm,wiring          some kinds of faults; `healthy` is a kind too
    python -m bench.heldout --part open --only window --settings across     some families or pairs, some settings

Writes `bench/results/heldout-PART.json` with every case. Of the closed part it holds names and outcomes; `--reveal` adds what was said
and what is true, for whoever does not change the judge.
"""

from __future__ import annotations

import argparse
import json
import select
import sys
import time
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.driver import RESULTS
from bench.heldout import cases, record
from bench.heldout.table import failing, tables
from bench.heldout.units import Case, Unit


def units(part: str, options: argparse.Namespace) -> list[Unit]:
    """Return what is asked for, one unit for each family and pair."""
    kinds = set(options.kinds.split(",")) if options.kinds else None
    healthy = kinds is None or "healthy" in kinds
    faults = [fault for fault in cases.faults(part) if kinds is None or fault.kind in kinds]
    asked: dict[str, Any] = {"healthy": healthy, "settings": options.settings, "sample": options.sample}
    made = [
        Unit(part, name, entry, faults=[f for f in faults if f.family == name], **asked)
        for name, entry in cases.families(part).items()
    ]
    for pair in cases.pairs(part):
        chosen = [fault for fault in pair.faults if kinds is None or fault.kind in kinds]
        made.append(Unit(part, pair.name, pair=pair, faults=chosen, **asked))
    wanted = options.only.split(",") if options.only else ["*"]
    return [u for u in made if (u.healthy or u.faults) and any(fnmatch(u.name, each) for each in wanted)]


def measure(chosen: list[Unit], jobs: int) -> Iterator[Case]:
    """Run the units, at most `jobs` at a time, each in a fork of this process."""
    waiting, running = list(chosen), {}
    while waiting or running:
        while waiting and len(running) < jobs:
            unit = waiting.pop(0)
            started = record.start(unit.run)
            running[started[1]] = (unit, started, time.monotonic())
        for reader in select.select(list(running), [], [])[0]:
            unit, started, since = running.pop(reader)
            found: list[Case] = record.join(started)
            print(
                f"{unit.part} {unit.name:32} {len(found):3} cases, {len(failing(found)):3} fail,"
                f" {time.monotonic() - since:5.0f} s; {len(waiting) + len(running)} to go",
                file=sys.stderr,
                flush=True,
            )
            for case in failing(found) if unit.part != "closed" else ():
                print(
                    f"    {case['outcome']}: {case['name']} [{case['setting']}] {case['said'][:300]}", file=sys.stderr
                )
            yield from found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=cases.PARTS, default="open")
    parser.add_argument("--kinds", default="", help="kinds of faults, separated by commas; healthy for healthy pairs")
    parser.add_argument("--only", default="", help="families or pairs, separated by commas; globs work")
    parser.add_argument("--settings", default="", help="only settings that hold this text: across, aten, 'same api'")
    parser.add_argument("--sample", type=int, default=100, help="per cent of the cases, the same ones each time")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument(
        "--reveal", action="store_true", help="of the closed part too, say what was said and what is true"
    )
    parser.add_argument("--json", type=Path, help="default: bench/results/heldout-PART.json")
    options = parser.parse_args()
    record.import_all()
    found = list(measure(units(options.part, options), options.jobs))
    open_to_read = options.part != "closed" or options.reveal
    if not open_to_read:
        found = [{key: value for key, value in case.items() if key not in ("said", "truth")} for case in found]
    path = options.json or RESULTS / f"heldout-{options.part}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(found, indent=1) + "\n")
    console = Console(width=None if sys.stdout.isatty() else 160)
    for each in tables(found):
        console.print(each)
    for case in failing(found) if open_to_read else ():
        place = case.get("truth", {})
        true = f"\n    true: step {place['step']} {', '.join(place['calls'][:3])}" if place else ""
        line = f"{case['outcome']}: {case['name']} [{case['setting']}]\n    said: {case['said']}{true}"
        console.print(line, markup=False, soft_wrap=True)
    total = sum(case["cpu_s"] for case in found)
    print(
        f"{len(found)} cases, {total:.0f} s of CPU, {sum(case['outcome'] == 'error' for case in found)} errors; {path}"
    )


if __name__ == "__main__":
    main()
