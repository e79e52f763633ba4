"""What an audit costs, and how many calls it judges: CPU time of one thread, against the plain step, interleaved.

python -m bench.audit.cost [--workloads gpt-tiny,gpt-small] [--repeats 3]
"""

from __future__ import annotations

import argparse
import tempfile
import time
import warnings
from collections import Counter
from pathlib import Path

import torch

import tensorprobe
from bench.workloads import build_named


def measure(name: str, folder: Path, repeats: int) -> str:
    workload = build_named(name)
    workload.step()
    with tensorprobe.capture(folder, model=workload.model, level="api", in_process=True, stacks=False) as probe:
        workload.step()
        probe.step()
    plain, audits = [], []
    for _ in range(repeats):
        for times, run in ((plain, workload.step), (audits, lambda: tensorprobe.audit(folder, jobs=0))):
            start = time.process_time()
            found = run()
            times.append(time.process_time() - start)
    answer = found.summary  # type: ignore[union-attr]
    calls = list(tensorprobe.open_run(folder).calls(step=0, rank=0))
    ways = Counter(call.direction for call in calls)
    judged = answer.passed + answer.failed, answer.backward_passed + answer.backward_failed
    shares = [f"{way} {done} of {ways[way]}" for way, done in zip(("forward", "backward"), judged, strict=True)]
    ratio = min(audits) / min(plain)
    return f"{name:16} step {min(plain):.3f} s, audit {min(audits):.3f} s: {ratio:.1f}x   {'; '.join(shares)}   {answer.reasons}"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--workloads", default="gpt-tiny,gpt-small,resnet-small")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for name in options.workloads.split(","):
        with tempfile.TemporaryDirectory() as work:
            print(measure(name, Path(work) / "run", options.repeats), flush=True)


if __name__ == "__main__":
    main()
