"""Harm captured programs at random moments and print a table: tried, survived, complete calls lost.

    make torture MINUTES=5

A program survives when it ends as it would without capture, and every call that was complete is in its record. Where the
record itself is destroyed (a full disk, a deleted folder), it survives when the loss is reported.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import tensorprobe

PROGRAM = """
import os, random, resource, shutil, signal, sys, torch, tensorprobe, warnings
torch.set_num_threads(1)
out, harm, seed, calls = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
random.seed(seed)
class Late(Exception): pass
def late(*_): raise Late
signal.signal(signal.SIGALRM, late)
if harm == "full disk":
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
harmed = random.randrange(20, calls - 20)
data, struck, caught = torch.arange(100.0), 0, 0
warnings.simplefilter("always")
with warnings.catch_warnings(record=True) as said, tensorprobe.capture(out) as probe:
    for number in range(calls):
        if number == harmed and harm == "deleted folder":
            shutil.rmtree(out, ignore_errors=True)
        if harm == "alarm":
            try:
                try:
                    signal.setitimer(signal.ITIMER_REAL, random.uniform(1e-6, 3e-4))
                    torch.add(data, number)
                finally:
                    signal.setitimer(signal.ITIMER_REAL, 0)
            except Late:
                continue
        else:
            torch.add(data, number)
        sys.stdout.write(f"{number}\\n")
        sys.stdout.flush()
        if number % 50 == 49:
            probe.step()
sys.stdout.write("reported\\n" if any(issubclass(each.category, tensorprobe.CaptureIncomplete) for each in said) else "end\\n")
"""
CALLS = 400
SIGNALS = {
    "SIGKILL": signal.SIGKILL,
    "SIGTERM to the process": signal.SIGTERM,
    "SIGTERM to the group": signal.SIGTERM,
    "SIGHUP to the group": signal.SIGHUP,
    "SIGINT to the group": signal.SIGINT,
}
REPORTED = ("full disk", "deleted folder")
KINDS = (*SIGNALS, "alarm", *REPORTED)


def harm(kind: str, seed: int, folder: Path) -> tuple[bool, int]:
    """Whether the program survived, and how many complete calls were lost without a report."""
    program, out = folder / "program.py", folder / "run"
    program.write_text(PROGRAM)
    victim = subprocess.Popen(
        [sys.executable, str(program), str(out), kind, str(seed), str(CALLS)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        text=True,
    )
    assert victim.stdout is not None
    lines: list[str] = []
    moment = random.Random(seed).randrange(20, CALLS - 20)
    with victim.stdout:
        for line in victim.stdout:
            lines.append(line.strip())
            if kind in SIGNALS and len(lines) == moment:
                send: Callable[[int, int], None] = os.killpg if "group" in kind else os.kill
                send(victim.pid, SIGNALS[kind])
    code = victim.wait(60)
    done = [int(line) for line in lines if line.isdigit()]
    if kind in REPORTED:
        return code == 0 and lines[-1:] == ["reported"], 0
    run = tensorprobe.open_run(out)
    found = {int(call.outputs[0].tensor()[0]) for call in run.calls() if call.op == "Torch.add" and call.outputs}
    lost = len(set(done) - found)
    ended = code == 0 if kind == "alarm" else code == -SIGNALS[kind] or (kind.startswith("SIGINT") and code in (1, 130))
    return ended and lost == 0, lost


def main() -> None:
    """Harm until the time is over."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=2.0, help="how long")
    parser.add_argument("--seed", type=int, default=0, help="of the first trial")
    chosen = parser.parse_args()
    table = {kind: [0, 0, 0] for kind in KINDS}
    end, seed = time.monotonic() + chosen.minutes * 60, chosen.seed
    while time.monotonic() < end:
        for kind in KINDS:
            folder = Path(tempfile.mkdtemp(prefix="tensorprobe-torture-"))
            try:
                survived, lost = harm(kind, seed, folder)
            finally:
                shutil.rmtree(folder, ignore_errors=True)
            row = table[kind]
            row[0], row[1], row[2] = row[0] + 1, row[1] + survived, row[2] + lost
            if not survived:
                print(f"did not survive: {kind}, seed {seed}")
            seed += 1
    print(f"{'harm':<26}{'tried':>7}{'survived':>10}{'calls lost':>12}")
    for kind, (tried, survived, lost) in table.items():
        print(f"{kind:<26}{tried:>7}{survived:>10}{lost:>12}")


if __name__ == "__main__":
    main()
