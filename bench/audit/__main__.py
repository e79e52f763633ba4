"""Does an audit name a wrong kernel in one run, and does compare with proof name it across devices?

python -m bench.audit [--families mixer,graph] [--catalog odd] [--level mix] [--kinds 6] [--json FILE]

For each family: the CPU, a second right device, and that device with each fault. The planted call is found in the digests of the
second device and of itself with the fault (`bench.heldout.truth`). Healthy pairs and healthy runs must raise no alarm.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import tensorprobe
from bench.audit.device import SecondDevice
from bench.audit.models import FAMILIES, KINDS, SPOILED
from bench.audit.odd import ODD, ODD_KINDS, ODD_SPOILED
from bench.heldout.truth import Truth, find_truth
from tensorprobe.engine import proof
from tensorprobe.replay.proof import serve_proofs
from tensorprobe.work.pool import Job

CATALOGS: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[str, ...]]] = {
    "first": (FAMILIES, KINDS, SPOILED),
    "odd": (ODD, ODD_KINDS, ODD_SPOILED),
}
"""Families, kinds of wrong results, and kernels that may be wrong."""
EVERY = FAMILIES | ODD


def record(folder: Path, family: str, device: SecondDevice | None, level: str = "api") -> Path:
    torch.manual_seed(5)
    model, loss = EVERY[family]()
    settings: dict[str, Any] = {"level": level, "in_process": True, "stacks": False, "overwrite": True}
    with tensorprobe.capture(folder, model=model, **settings), device or contextlib.nullcontext():
        if device is not None and isinstance(device.spoil, type):
            device.spoil = device.spoil()
        loss().backward()
    return folder


def run_here(job: Job, parcels: list[bytes], *, take: Callable[[int, bytes], None], **_: Any) -> None:
    """Stand in for the pool: a process for each of hundreds of comparisons would take hours."""
    with serve_proofs(job.start, None) as answer:
        for number, parcel in enumerate(parcels):
            take(number, answer(parcel).content)  # type: ignore[operator]


def ask(one: Path, other: Path, prove: str) -> tuple[str, str]:
    """Return the answer, and the call that is blamed."""
    summary = tensorprobe.compare(one, other, prove=prove, keep_rows=False).summary
    found = summary.divergence
    return summary.answer, "" if found is None else f"{found.call} {found.status}"


def measure_family(family: str, work: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    level, (_, kinds, spoiled) = options.level, CATALOGS[options.catalog]
    cpu, right = record(work / "cpu", family, None, level), record(work / "right", family, SecondDevice(), level)
    rows: list[dict[str, Any]] = []
    healthy = {prove: ask(cpu, right, prove) for prove in options.prove}
    alarms = [[check.call for check in tensorprobe.audit(run, jobs=0).failures] for run in (cpu, right)]
    rows.append({"family": family, "fault": "", "compare": healthy, "audit": alarms})
    for number, op in enumerate(spoiled):
        for kind, spoil in ([*kinds.items()] * 2)[number % len(kinds) :][: min(options.kinds, len(kinds))]:
            device = SecondDevice(op, spoil)
            wrong = record(work / "wrong", family, device, level)
            truth = find_truth(right, right, wrong) if device.struck else Truth()
            if not truth.calls:
                continue
            rows.append(
                {
                    "family": family,
                    "fault": f"{op}: {kind}",
                    "planted": truth.calls,
                    "above": truth.above,
                    "roundoffs": truth.roundoffs,
                    "compare": {prove: ask(cpu, wrong, prove) for prove in options.prove},
                    "swapped": ask(wrong, cpu, options.prove[-1]),
                    "audit": [check.call for check in tensorprobe.audit(wrong, jobs=0).failures],
                }
            )
    return rows


def outcome(row: dict[str, Any], prove: str) -> str:
    answer, blamed = row["swapped"] if prove == "swapped" else row["compare"][prove]
    if not row["fault"]:
        return "healthy" if answer == "agrees" else "false alarm"
    call, _, status = blamed.partition(" ")
    if call in row["planted"] and status == "introduced":
        return "named"
    within = "" if row["above"] else ", within rounding"
    return ("missed" if answer == "agrees" else "misled") + within


def audited(row: dict[str, Any]) -> str:
    if not row["fault"]:
        return "false alarm" if any(row["audit"]) else "healthy"
    planted = {call.replace(".backward", ".forward") for call in row["planted"]}
    within = "" if row["above"] else ", within rounding"
    return "named" if planted & set(row["audit"]) else ("misled" if row["audit"] else "missed") + within


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--catalog", default="first", choices=CATALOGS)
    parser.add_argument("--families", default="")
    parser.add_argument("--level", default="api", choices=["api", "mix", "aten"])
    parser.add_argument("--kinds", type=int, default=2, help="kinds of faults for each kernel; there are six, or ten")
    parser.add_argument("--prove", default="off,auto", type=lambda given: given.split(","))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    proof.run_in_processes = run_here  # type: ignore[assignment]
    rows = []
    ways: list[tuple[str, Callable[[dict[str, Any]], str]]] = [
        *((f"compare --prove {way}", lambda row, way=way: outcome(row, way)) for way in options.prove),
        ("compare, sides swapped", lambda row: outcome(row, "swapped") if row["fault"] else "healthy"),
        ("audit", audited),
    ]
    for family in options.families.split(",") if options.families else CATALOGS[options.catalog][0]:
        with tempfile.TemporaryDirectory() as work:
            found = measure_family(family, Path(work), options)
        rows += found
        for name, said in ways:
            print(f"{family:24} {name:24}", dict(Counter(said(row) for row in found)), flush=True)
        for row in found:
            if {said(row) for _, said in ways[-3:]} - {"named", "healthy"}:
                shown = [row["fault"] or "no fault", row.get("planted", [])[:2], f"{row.get('roundoffs', 0):.3g}"]
                print(
                    "   ", *shown, row["compare"][options.prove[-1]], row.get("swapped"), row["audit"][:3], flush=True
                )
    for name, said in ways:
        print(f"{options.level} {name:24}", dict(Counter(said(row) for row in rows)))
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
