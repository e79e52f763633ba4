"""The simulated device's catalog of faults: compare with and without proof, and an audit of the faulty run alone.

python -m bench.audit.catalog [--faults softmax-tail,linear-scale] [--across]
"""

from __future__ import annotations

import argparse
import tempfile
import warnings
from collections import Counter
from pathlib import Path

import torch

import tensorprobe
from bench.audit.__main__ import run_here
from bench.compare.detection import fault_pairs
from tensorprobe import sim
from tensorprobe.engine import proof
from tensorprobe.errors import TensorprobeError


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--faults", default="")
    parser.add_argument("--across", action="store_true", help="right runs on the CPU, whose roundings are others")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    sim.enable()
    proof.run_in_processes = run_here  # type: ignore[assignment]
    wanted = set(options.faults.split(",")) - {""}
    entries = [each for each in sim.catalog() if each.model != "parallel" and (not wanted or each.name in wanted)]
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as work:
        audited = set()
        for entry, (right, wrong) in fault_pairs(entries, Path(work), device="cpu" if options.across else "npu"):
            assert entry.truth is not None
            expected = f"{entry.truth.step}:{entry.truth.api}"
            said = {}
            for prove in ("off", "auto"):
                found = tensorprobe.compare(right, wrong, prove=prove, keep_rows=False).divergence
                said[prove] = "agrees" if found is None else f"{found.step}:{found.call or found.candidate_call}"
                word = "named" if said[prove] == expected else "missed" if found is None else "misled"
                counts[f"{prove} {word}"] += 1
            try:
                failures = [f"{each.step}:{each.call}" for each in tensorprobe.audit(wrong, jobs=0).failures]
            except TensorprobeError as error:
                failures = [str(error)]
            planted = expected.replace(".backward", ".forward")
            counts[f"audit {'named' if planted in failures else 'misled' if failures else 'missed'}"] += 1
            if right not in audited:
                audited.add(right)
                alarms = tensorprobe.audit(right, jobs=0).failures
                counts[f"healthy run {'alarm' if alarms else 'passes'}"] += 1
            if set(said.values()) != {expected} or planted not in failures:
                print(entry.name, expected, said, failures[:2], len(failures), sep=" | ", flush=True)
    print(dict(sorted(counts.items())))


if __name__ == "__main__":
    main()
