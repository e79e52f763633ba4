"""Sweep the simulated device over torch's whole operator database, and print what it gets wrong.

    python -m bench.sim [--samples 12] [--dtype bfloat16]

Entries run in a worker process, so that one that kills its process is counted as a crash and the sweep goes on. Writes
bench/results/sim_sweep.json. Exit status 1 when fewer than 98 % of the supported entries are right or any crashed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections import Counter
from dataclasses import asdict

from bench.driver import RESULTS, environment, write_report

REQUIRED_SHARE = 0.98


def work(first: int, samples: int, dtype: str | None) -> None:
    """Check entries from the `first` on, one JSON line each; the line of an entry is announced before it runs."""
    import torch

    from bench.sim import sweep
    from tensorprobe import sim

    torch.set_num_threads(1)
    sim.enable()
    chosen = getattr(torch, dtype) if dtype else None
    for number, entry in enumerate(sweep.entries()):
        if number >= first:
            print(json.dumps({"begin": number, "entry": sweep.label(entry)}), flush=True)
            print(json.dumps(asdict(sweep.check_entry(entry, most_samples=samples, dtype=chosen))), flush=True)


def sweep_all(samples: int, dtype: str | None) -> list[dict[str, object]]:
    """Outcomes of all entries; a worker that dies is replaced, and the entry it was at is a crash."""
    outcomes: list[dict[str, object]] = []
    first, finished = 0, False
    while not finished:
        command = [sys.executable, "-m", "bench.sim", "--work", str(first), "--samples", str(samples)]
        command += ["--dtype", dtype] if dtype else []
        begun: dict[str, object] | None = None
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment()
        ) as worker:
            assert worker.stdout is not None
            for line in worker.stdout:
                message = json.loads(line)
                if "begin" in message:
                    begun = message
                else:
                    outcomes.append(message)
                    begun = None
        finished = worker.returncode == 0
        if not finished:
            if begun is None:
                raise SystemExit(
                    f"the worker ended with status {worker.returncode} between two entries (first entry was {first})"
                )
            outcomes.append({"entry": begun["entry"], "status": "crash", "detail": f"exit status {worker.returncode}"})
            first = int(str(begun["begin"])) + 1
    return outcomes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=12)
    parser.add_argument("--dtype", help="only entries that take this type, such as bfloat16")
    parser.add_argument("--work", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work is not None:
        work(options.work, options.samples, options.dtype)
        return 0
    started = time.monotonic()
    outcomes = sweep_all(options.samples, options.dtype)
    counts = Counter(str(outcome["status"]) for outcome in outcomes)
    supported = len(outcomes) - counts["unsupported"] - counts["no samples"]
    for outcome in outcomes:
        if outcome["status"] not in ("right", "no samples"):
            print(f"{outcome['status']:12}{outcome['entry']}: {outcome['detail']}")
    share = counts["right"] / supported
    print(
        f"{counts['right']} of {supported} supported entries right ({share:.1%}); {counts['crash']} crashes; "
        + f"{dict(counts)}"
    )
    write_report(
        RESULTS / "sim_sweep.json", {"seconds": time.monotonic() - started, "counts": counts, "outcomes": outcomes}
    )
    return 0 if share >= REQUIRED_SHARE and not counts["crash"] else 1


if __name__ == "__main__":
    sys.exit(main())
