"""Does an audit name a wrong kernel in one run, and does compare with proof name it across devices?

python -m bench.audit [--families mixer,graph] [--kinds 6] [--json FILE]

For each family: the CPU, a second right device, and that device with each fault. The planted call is the first that differs in any
bit between the second device and itself with the fault. Healthy pairs and healthy runs must raise no alarm.
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
from tensorprobe.engine import proof
from tensorprobe.replay.proof import serve_proofs
from tensorprobe.work.pool import Job


def record(folder: Path, family: str, device: SecondDevice | None) -> Path:
    torch.manual_seed(5)
    model, loss = FAMILIES[family]()
    settings: dict[str, Any] = {"level": "api", "in_process": True, "stacks": False, "overwrite": True}
    with tensorprobe.capture(folder, model=model, **settings), device or contextlib.nullcontext():
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


def measure_family(family: str, work: Path, kinds: int) -> list[dict[str, Any]]:
    cpu, right = record(work / "cpu", family, None), record(work / "right", family, SecondDevice())
    rows: list[dict[str, Any]] = []
    healthy = {prove: ask(cpu, right, prove) for prove in ("off", "auto")}
    alarms = [[check.call for check in tensorprobe.audit(run, jobs=0).failures] for run in (cpu, right)]
    rows.append({"family": family, "fault": "", "compare": healthy, "audit": alarms})
    for number, op in enumerate(SPOILED):
        for kind, spoil in [*KINDS.items(), *KINDS.items()][number % len(KINDS) :][:kinds]:
            device = SecondDevice(op, spoil)
            wrong = record(work / "wrong", family, device)
            if not device.struck:
                continue
            planted = tensorprobe.compare(right, wrong, prove="off", keep_rows=False).summary.first_difference
            if planted is None:
                continue
            names = [check.call for check in tensorprobe.audit(wrong, jobs=0).failures]
            rows.append(
                {
                    "family": family,
                    "fault": f"{op}: {kind}",
                    "planted": planted.call,
                    "compare": {prove: ask(cpu, wrong, prove) for prove in ("off", "auto")},
                    "audit": names,
                }
            )
    return rows


def outcome(row: dict[str, Any], prove: str) -> str:
    answer, blamed = row["compare"][prove]
    if not row["fault"]:
        return "healthy" if answer == "agrees" else "false alarm"
    if answer == "agrees":
        return "missed"
    return "named" if blamed == f"{row['planted']} introduced" else "misled"


def audited(row: dict[str, Any]) -> str:
    if not row["fault"]:
        return "false alarm" if any(row["audit"]) else "healthy"
    planted = row["planted"].replace(".backward", ".forward")
    return "named" if planted in row["audit"] else "misled" if row["audit"] else "missed"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--families", default=",".join(FAMILIES))
    parser.add_argument("--kinds", type=int, default=2, help="kinds of faults for each kernel; there are six")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    proof.run_in_processes = run_here  # type: ignore[assignment]
    rows = []
    for family in options.families.split(","):
        with tempfile.TemporaryDirectory() as work:
            found = measure_family(family, Path(work), options.kinds)
        rows += found
        for prove in ("off", "auto"):
            print(
                f"{family:16} compare --prove {prove:5}",
                dict(Counter(outcome(row, prove) for row in found)),
                flush=True,
            )
        print(f"{family:16} audit               ", dict(Counter(audited(row) for row in found)), flush=True)
        for row in found:
            if outcome(row, "auto") not in ("named", "healthy") or audited(row) not in ("named", "healthy"):
                print(
                    "   ",
                    row["fault"] or "no fault",
                    "| planted",
                    row.get("planted"),
                    "|",
                    row["compare"]["auto"],
                    "|",
                    row["audit"][:3],
                    flush=True,
                )
    for prove in ("off", "auto"):
        print(f"compare --prove {prove:5}", dict(Counter(outcome(row, prove) for row in rows)))
    print("audit               ", dict(Counter(audited(row) for row in rows)))
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
