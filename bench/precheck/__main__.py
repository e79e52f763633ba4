"""How much of torch does precheck run, and is what it says right? Shares, reasons, and what is flagged.

Three parts: every op of torch's own table of ops (`op_db`, first samples, float32 and bfloat16), one captured training step
of six transformers models, and the faults of the simulated device's catalog, each planted in turn (see
bench.precheck.faults). All on the simulated device, which computes on the CPU: whatever is flagged without a fault is
a false alarm.

    python -m bench.precheck                     everything (about ten minutes)
    python -m bench.precheck --parts op_db,zoo --samples 1
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch

import tensorprobe
from bench.driver import RESULTS
from bench.precheck import faults as planting
from tensorprobe import sim
from tensorprobe.checks.check import CheckSettings, check_call
from tensorprobe.record.stored import StoredCall

DEVICE = "npu"
STANDARDS = ("noise-aware", "seed")
DATA = ("random", "real")


def forward_calls(folder: Path) -> list[StoredCall]:
    run = tensorprobe.open_run(folder)
    return [call for call in run.calls(step=run.steps[-1]) if call.direction == "forward"]


def is_differentiable(call: StoredCall) -> bool:
    """Whether the recorded program could ask for a gradient of it."""
    return any(slot.grad for slot in call.outputs) and any(slot.grad for slot in call.slots if slot.side != "output")


def check_all(calls: list[StoredCall], settings: CheckSettings) -> dict[str, Any]:
    """Counts over all calls."""
    counts: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    flagged = []
    started = time.perf_counter()
    for call in calls:
        check = check_call(call, None, settings)
        counts[f"forward {check.forward}"] += 1
        if check.forward == "skip":
            reasons[check.message] += 1
        if is_differentiable(call):
            counts["differentiable"] += 1
            counts[f"backward {check.backward}"] += 1
            if check.backward == "skip" and check.forward != "skip":
                reasons[f"backward: {check.message or 'no gradient'}"] += 1
        if "fail" in (check.forward, check.backward):
            flagged.append(f"{call.name}: {check.message}")
    elapsed_s = time.perf_counter() - started
    run = counts["forward pass"] + counts["forward fail"]
    return {
        "calls": len(calls),
        "replayed_forward": run / max(len(calls), 1),
        "replayed_backward": (counts["backward pass"] + counts["backward fail"]) / max(counts["differentiable"], 1),
        "counts": dict(counts),
        "skipped": dict(reasons.most_common()),
        "flagged": len(flagged),
        "which": flagged[:40],
        "calls_a_second": len(calls) / max(elapsed_s, 1e-9),
    }


def capture_op_db(folder: Path, dtype: torch.dtype, samples: int) -> dict[str, int]:
    """Every op of the table with its first samples, forward and backward; what raises is counted."""
    from torch.testing._internal.common_methods_invocations import op_db

    prepared: list[Any] = []
    for op in op_db:
        if dtype in op.supported_dtypes("cpu"):
            torch.manual_seed(0)
            gradients = op.supports_autograd and dtype in op.supported_backward_dtypes("cpu")
            found = op.sample_inputs("cpu", dtype, requires_grad=gradients)
            prepared += [(op, sample) for sample in islice(found, samples)]
    raised = 0
    with tensorprobe.capture(folder, mode="tensor", level="api", in_process=True, stacks=False):
        for op, sample in prepared:
            try:
                result = op(sample.input, *sample.args, **sample.kwargs)
                leaves = torch.utils._pytree.tree_leaves(result)
                outputs = [each for each in leaves if isinstance(each, torch.Tensor) and each.requires_grad]
                if outputs:
                    torch.autograd.backward(outputs, [torch.ones_like(output) for output in outputs])
            except (RuntimeError, AssertionError, NotImplementedError):  # ops for other hardware, sparse gradients
                raised += 1
    return {"ops": len({op.name for op, _ in prepared}), "samples": len(prepared), "raised_in_capture": raised}


def op_db_part(work: Path, samples: int) -> Iterator[dict[str, Any]]:
    for dtype in (torch.float32, torch.bfloat16):
        folder = work / f"op_db-{dtype}"
        made = capture_op_db(folder, dtype, samples)
        calls = [call for call in forward_calls(folder) if call.op != "Torch.ones_like" or call.number % 50 == 0]
        for data in DATA:
            found = check_all(calls, CheckSettings(device=DEVICE, data=data))  # type: ignore[arg-type]
            yield {"part": "op_db", "what": str(dtype), "data": data, "standard": "noise-aware", **made, **found}


def zoo_part(work: Path) -> Iterator[dict[str, Any]]:
    import transformers

    from bench.zoo import MODELS

    transformers.logging.set_verbosity_error()
    for name, make in MODELS.items():
        folder = work / f"zoo-{name}"
        torch.manual_seed(5)
        model, loss = make()
        model.train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        with tensorprobe.capture(folder, model=model, level="api", mode="tensor") as probe:
            loss().backward()
            optimizer.step()
            probe.step()
        calls = forward_calls(folder)
        ways = [("random", "noise-aware", False), ("real", "noise-aware", False), ("random", "seed", False)]
        for data, standard, hard in [*ways, ("random", "noise-aware", True)]:
            settings = CheckSettings(device=DEVICE, data=data, standard=standard, hard=hard)  # type: ignore[arg-type]
            label = f"{standard}, hard inputs too" if hard else standard
            yield {"part": "zoo", "what": name, "data": data, "standard": label, **check_all(calls, settings)}


def catalog_part(work: Path) -> dict[str, Any]:
    """Every fault, every standard, both kinds of data."""
    calls = planting.capture_models(work)
    entries = sim.catalog()
    kernel = [entry for entry in entries if not planting.no_kernel_fault(entry)]
    outcomes: list[planting.Outcome] = []
    for data in DATA:
        for each in planting.plant(kernel, calls, STANDARDS, data):
            outcomes += each
            for one in each:
                print(
                    f"  {one.fault:<30} {data:<7} {one.standard:<12} flagged {one.flagged} of {one.changed}", flush=True
                )
    return {
        "no_kernel_faults": {entry.name: why for entry in entries if (why := planting.no_kernel_fault(entry))},
        "summary": [planting.summary(outcomes, standard, data) for data in DATA for standard in STANDARDS],
        "healthy": [planting.healthy(calls, standard, data) for data in DATA for standard in STANDARDS],
        "outcomes": planting.as_table(outcomes),
    }


def show(row: dict[str, Any]) -> None:
    print(
        f"{row['part']:<6} {row['what']:<16} {row['data']:<7} {row['standard']:<30} {row['calls']:>5} calls, "
        f"replayed {row['replayed_forward']:.1%} forward, {row['replayed_backward']:.1%} backward, "
        f"{row['flagged']} flagged, {row['calls_a_second']:.0f} a second",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default="op_db,zoo,catalog")
    parser.add_argument("--samples", type=int, default=3, help="of each op of op_db")
    parser.add_argument("--json", type=Path, default=RESULTS / "precheck.json")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    sim.enable(DEVICE)
    torch.set_num_threads(1)
    parts = options.parts.split(",")
    rows: list[dict[str, Any]] = []
    catalog: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        if "op_db" in parts:
            for row in op_db_part(work, options.samples):
                show(row)
                rows.append(row)
        if "zoo" in parts:
            for row in zoo_part(work):
                show(row)
                rows.append(row)
        if "catalog" in parts:
            catalog = catalog_part(work)
            for line in (*catalog["summary"], *catalog["healthy"]):
                print({key: value for key, value in line.items() if key != "which"})
    options.json.parent.mkdir(exist_ok=True)
    options.json.write_text(json.dumps({"breadth": rows, "catalog": catalog}, indent=1) + "\n")


if __name__ == "__main__":
    main()
