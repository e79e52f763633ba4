"""Is every planted fault named, and does nothing else raise an alarm? One table for all policies, side by side.

For each fault of the simulated device's catalog a right and a faulty training are captured and compared; the named call must be
the one where the fault first shows. Clean pairs (the same training twice, with other thread counts, on the CPU and on the
simulated device) must agree. Captures are made once; each policy then judges the same runs.

    python -m bench.compare.detection                    all faults, all policies
    python -m bench.compare.detection --across           right runs on the CPU, whose roundings are others
    python -m bench.compare.detection --faults softmax-tail,linear-scale --policies noise-aware
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path

import torch

import tensorprobe
from bench.driver import RESULTS, environment
from bench.sim.models import workload
from tensorprobe import sim
from tensorprobe.engine import Result
from tensorprobe.errors import TensorprobeError
from tensorprobe.judge import POLICIES
from tensorprobe.sim.known_faults import CatalogFault

CLEAN_STEPS = 3


@dataclass
class Outcome:
    """What one policy said of one pair."""

    pair: str
    policy: str
    expected: str
    named: str
    status: str

    @property
    def detected(self) -> bool:
        return bool(self.named)

    @property
    def exact(self) -> bool:
        return self.named == self.expected


def record(
    folder: Path, model: str, steps: int, *, device: str = "npu", threads: int = 1, mode: str = "tensor"
) -> None:
    """Capture a training of the catalog's workload; an error of the device ends it early, as it would for a user."""
    torch.set_num_threads(threads)
    work = workload(model, device)
    with tensorprobe.capture(folder, model=work.model, level="api", mode=mode, overwrite=True) as probe:
        try:
            for _ in range(steps):
                work.step()
                probe.step()
        except RuntimeError as error:
            if "simulated device error" not in str(error):
                raise
    torch.set_num_threads(1)


def judge(pair: str, expected: str, runs: tuple[Path, Path], policy: str) -> Outcome:
    """Compare and say which call was named, as `step:name`."""
    try:
        result: Result = tensorprobe.compare(*runs, policy=policy, keep_rows=False)
    except TensorprobeError as error:
        return Outcome(pair, policy, expected, "", f"{type(error).__name__}: {error}")
    found = result.divergence
    if found is None:
        return Outcome(pair, policy, expected, "", "agrees")
    return Outcome(pair, policy, expected, f"{found.step}:{found.call or found.candidate_call}", found.status)


def fault_pairs(
    entries: list[CatalogFault], work: Path, *, device: str = "npu"
) -> Iterator[tuple[CatalogFault, tuple[Path, Path]]]:
    """Each fault with a right run on `device` and a faulty one on the simulated device; right runs are shared."""
    for entry in entries:
        if entry.model == "parallel":
            yield entry, parallel_pair(entry.name, work)
            continue
        right = work / f"right-{entry.model}-{entry.steps}-{device}"
        if not right.exists():
            record(right, entry.model, entry.steps, device=device)
        wrong = work / f"wrong-{entry.name}"
        with sim.installed([entry.fault]):
            record(wrong, entry.model, entry.steps)
        yield entry, (right, wrong)


def parallel_pair(name: str, work: Path) -> tuple[Path, Path]:
    """Two processes; the faults of collectives need them."""
    right, wrong = work / "right-parallel", work / f"wrong-{name}"
    if not right.exists():
        start_two(right, "")
    start_two(wrong, name)
    return right, wrong


def start_two(folder: Path, fault: str) -> None:
    with tempfile.TemporaryDirectory() as store:
        command = [
            sys.executable,
            "-m",
            "bench.compare.detection",
            "--worker",
            str(folder),
            "--store",
            f"{store}/store",
            "--faults",
            fault,
        ]
        processes = [subprocess.Popen(command, env=environment(RANK=str(rank), WORLD_SIZE="2")) for rank in (0, 1)]
        codes = [process.wait() for process in processes]
        if any(codes):
            raise SystemExit(f"the parallel run with fault {fault!r} failed")


def worker(folder: Path, store: str, fault: str) -> None:
    """One of the two processes of a parallel run."""
    import torch.distributed as dist

    sim.enable()
    rank = int(os.environ["RANK"])
    dist.init_process_group("hccl", init_method=f"file://{store}", rank=rank, world_size=2)
    with sim.installed([entry.fault for entry in sim.catalog() if entry.name == fault]):
        work = workload("parallel", "npu")
        with tensorprobe.capture(folder, model=work.model, level="api", mode="tensor") as probe:
            work.step()
            probe.step()
    dist.destroy_process_group()


def clean_pairs(work: Path) -> Iterator[tuple[str, tuple[Path, Path]]]:
    """Pairs of runs that are right, some of them with other roundings."""
    for model in ("gpt", "gpt-fused", "gpt-bf16", "cnn", "router"):
        runs = {
            "first": {"device": "npu"},
            "again": {"device": "npu"},
            "cpu": {"device": "cpu"},
            "cpu-threads": {"device": "cpu", "threads": 2},
        }
        for name, settings in runs.items():
            record(work / f"clean-{model}-{name}", model, CLEAN_STEPS, **settings)  # type: ignore[arg-type]
        for one, other in (("first", "again"), ("cpu", "cpu-threads"), ("cpu", "first")):
            yield f"{model}: {one} / {other}", (work / f"clean-{model}-{one}", work / f"clean-{model}-{other}")


def wide_pairs(work: Path) -> Iterator[tuple[str, tuple[Path, Path]]]:
    """A wider model, where sums are long enough to come out differently on other numbers of threads."""
    for threads in (1, 2):
        record_wide(work / f"wide-{threads}", threads)
    yield "wide gpt: 1 / 2 threads", (work / "wide-1", work / "wide-2")


def zoo_pairs(work: Path) -> Iterator[tuple[str, tuple[Path, Path]]]:
    from bench.zoo import clean_pairs as pairs  # imports transformers

    return pairs(work)


def record_wide(folder: Path, threads: int) -> None:
    torch.set_num_threads(threads)
    torch.manual_seed(3)
    layer = torch.nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, activation="gelu", batch_first=True)
    model = torch.nn.Sequential(layer, torch.nn.LayerNorm(256), torch.nn.Linear(256, 500))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x, target = torch.randn(8, 64, 256), torch.randint(500, (8 * 64,))
    with tensorprobe.capture(folder, model=model, level="api", mode="tensor", overwrite=True) as probe:
        for _ in range(3):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x).flatten(0, 1), target).backward()
            optimizer.step()
            probe.step()
    torch.set_num_threads(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", default=None, help="names, separated by commas; all when not given")
    parser.add_argument("--policies", default=",".join(POLICIES))
    parser.add_argument("--across", action="store_true", help="right runs on the CPU: faults on top of other roundings")
    parser.add_argument("--zoo", action="store_true", help="clean pairs of transformers' models too (minutes)")
    parser.add_argument("--no-clean", action="store_true", help="leave the clean pairs out")
    parser.add_argument("--json", type=Path, default=RESULTS / "detection.json")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--store", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker(options.worker, options.store, options.faults)
        return
    started = time.monotonic()
    sim.enable()
    wanted = None if options.faults is None else set(options.faults.split(","))
    entries = [entry for entry in sim.catalog() if wanted is None or entry.name in wanted]
    policies = options.policies.split(",")
    faults: list[Outcome] = []
    clean: list[Outcome] = []
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        for entry, runs in fault_pairs(entries, work, device="cpu" if options.across else "npu"):
            assert entry.truth is not None
            expected = f"{entry.truth.step}:{entry.truth.api}"
            outcomes = [judge(entry.name, expected, runs, policy) for policy in policies]
            faults += outcomes
            show(outcomes)
        if not options.no_clean:
            for name, runs in chain(clean_pairs(work), wide_pairs(work), zoo_pairs(work) if options.zoo else ()):
                outcomes = [judge(name, "", runs, policy) for policy in policies]
                clean += outcomes
                show(outcomes)
    table = summarise(faults, clean, policies)
    print(
        f"\n{len(entries)} faults, {len(clean) // max(len(policies), 1)} clean pairs, {time.monotonic() - started:.0f} s\n"
    )
    print(f"{'policy':<14} {'recall':>8} {'exact':>8} {'false alarms':>14}")
    for policy, line in table.items():
        print(f"{policy:<14} {line['recall']:>8.1%} {line['exact']:>8.1%} {line['false_alarms']:>14}")
    options.json.parent.mkdir(exist_ok=True)
    outcomes = [asdict(one) for one in (*faults, *clean)]
    options.json.write_text(json.dumps({"summary": table, "outcomes": outcomes}, indent=1) + "\n")


def show(outcomes: list[Outcome]) -> None:
    """A line for each pair; what is not as it should be is spelled out."""
    marks = []
    for one in outcomes:
        right = one.exact if one.expected else not one.detected
        marks.append(f"{one.policy} {'ok' if right else one.named or one.status}")
    wanted = outcomes[0].expected or "agrees"
    print(f"{outcomes[0].pair:<28} {wanted:<58} {' · '.join(marks)}", flush=True)


def summarise(faults: list[Outcome], clean: list[Outcome], policies: list[str]) -> dict[str, dict[str, float]]:
    table = {}
    for policy in policies:
        mine = [one for one in faults if one.policy == policy]
        table[policy] = {
            "recall": sum(one.detected for one in mine) / max(len(mine), 1),
            "exact": sum(one.exact for one in mine) / max(len(mine), 1),
            "false_alarms": sum(one.detected for one in clean if one.policy == policy),
        }
    return table


if __name__ == "__main__":
    main()
