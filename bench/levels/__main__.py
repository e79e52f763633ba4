"""Do healthy pairs agree at every level, and is a fault at level module blamed on the earliest module?

python -m bench.levels [--kinds healthy,precision,fault] [--only llama,swin] [--settings module] [--jobs 2] [--json FILE]

healthy     each family in fp32 and bf16: the CPU against a second right device and against the simulated one, at levels api, mix,
            module, aten, and with summaries: every alarm is a failure
precision   fp32 against bf16, bf16 autocast and fp16 on the CPU, at levels api, mix and module
steps       40 steps on two devices with an optimizer of the family's turn: healthy, at api, module and with summaries; and with
            a fault in step 37, which must be named in that step
fault       a wrong kernel on the second device, recorded at level module and mix: the first module with equal bits in and other
            bits out between a right and a wrong run of that device must be named; in bf16, against fp32 too
"""

from __future__ import annotations

import argparse
import json
import signal
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench.heldout import kinds, record, truth
from bench.heldout.cases import RECORDS, Setting
from bench.heldout.plant import Plant, kernel, unseen_update
from bench.heldout.record import Program
from bench.levels.families import FAMILIES

FAULTS = {
    "product 3 % too large": ("addmm", kinds.scaled(1.03)),
    "product 3 % too large, mm": ("mm", kinds.scaled(1.03)),
    "convolution 3 % too large": ("convolution", kinds.scaled(1.03)),
    "norm, one element": ("native_layer_norm", kinds.one_element(0.5)),
    "rsqrt 2 % too large": ("rsqrt", kinds.scaled(1.02)),
}
Case = dict[str, Any]


def measure(name: str, asked: argparse.Namespace) -> list[Case]:
    """All cases of one family."""
    signal.alarm(0)
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for kind in asked.kinds.split(","):
            for case in {"healthy": _healthy, "precision": _precision, "fault": _faults, "steps": _long}[kind](
                name, Path(folder), asked
            ):
                found.append({"family": name, "kind": kind, **case})
    return found


def _guarded(case: Case, one: Path, other: Path, **options: Any) -> Case:
    try:
        said = record.compare(one, other, **options)
    except RuntimeError:
        said = {"answer": "error", "text": traceback.format_exc()[-800:]}
    found = said.get("divergence") or {}
    case |= {
        "answer": said["answer"],
        "blamed": found.get("call") or found.get("candidate_call") or "",
        "module": found.get("module", ""),
    }
    case |= {
        "step": found.get("step"),
        "status": found.get("status", ""),
        "row": found.get("row"),
        "text": said.get("text", ""),
        "notes": said.get("notes", []),
    }
    case |= {"finding": found.get("finding"), "input_error": found.get("input_error")}
    return case


def _healthy(name: str, folder: Path, asked: argparse.Namespace) -> Iterator[Case]:
    wanted = asked.settings
    for precision in ("fp32", "bf16"):
        for recorded in RECORDS:
            setting = Setting(**recorded)
            about = "summary" if setting.mode == "summary" else setting.level
            if wanted and about not in wanted.split(","):
                continue
            program = Program(FAMILIES[name], precision)
            record.record(folder / "cpu", program, "cpu", setting)
            for where in asked.devices.split(","):
                record.record(folder / where, program, where, setting)
                case = _guarded({"setting": f"{precision} {where} {about}"}, folder / "cpu", folder / where)
                yield case | {"failed": case["answer"] != "agrees"}


def _precision(name: str, folder: Path, asked: argparse.Namespace) -> Iterator[Case]:
    for level in ("api", "mix", "module"):
        if asked.settings and level not in asked.settings.split(","):
            continue
        setting = Setting(level=level)
        record.record(folder / "wide", Program(FAMILIES[name], "fp32"), "cpu", setting)
        for precision in ("bf16", "autocast", "fp16"):
            try:
                record.record(folder / "narrow", Program(FAMILIES[name], precision), "cpu", setting)
            except RuntimeError:  # not every model runs in fp16
                continue
            case = _guarded({"setting": f"fp32 / {precision} {level}"}, folder / "wide", folder / "narrow")
            yield case | {"failed": case["answer"] != "agrees"}


def _faults(name: str, folder: Path, asked: argparse.Namespace) -> Iterator[Case]:
    for about, (op, wrong) in FAULTS.items():
        for number in (1, 4):
            for level in ("module", "mix"):
                for precision, other in (("fp32", "fp32"), ("fp32", "bf16")):
                    if asked.settings and level not in asked.settings.split(","):
                        continue
                    setting = Setting(level=level)
                    right, planted = (
                        Program(FAMILIES[name], other),
                        Program(FAMILIES[name], other, plant=kernel(op, wrong, number)),
                    )
                    if not record.record(folder / "wrong", planted, "second", setting).struck:
                        continue
                    record.record(folder / "cpu", Program(FAMILIES[name], precision), "cpu", setting)
                    for each in ("right", "again"):
                        record.record(folder / each, right, "second", setting)
                    found = truth.find_truth(folder / "right", folder / "again", folder / "wrong")
                    if not found.calls or not found.above:
                        continue
                    case = _guarded(
                        {"setting": f"{precision}/{other} {level}: {about}, {number}"}, folder / "cpu", folder / "wrong"
                    )
                    exact, near = case["blamed"] in found.calls, case["blamed"] in found.region
                    outcome = (
                        "exact" if exact else "region" if near else "missed" if case["answer"] == "agrees" else "wrong"
                    )
                    yield case | {
                        "failed": not (exact or near),
                        "outcome": outcome,
                        "truth": found.calls[:3],
                        "size": found.roundoffs,
                    }


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW": partial(torch.optim.AdamW, lr=1e-3),
    "SGD": partial(torch.optim.SGD, lr=1e-2, momentum=0.9),
    "Adam, fused": partial(torch.optim.Adam, lr=1e-3, fused=True),
    "RMSprop": partial(torch.optim.RMSprop, lr=1e-3),
    "Adagrad": partial(torch.optim.Adagrad, lr=1e-2),
}
LATE: dict[str, Plant] = {
    "product 3 % too large": kernel("addmm", kinds.scaled(1.03), 1, step=37),
    "product 3 % too large, backward": kernel("mm", kinds.scaled(1.03), 2, "backward", step=37),
    "one update 5 % too large": lambda training: unseen_update(_a_matrix(training.model), 1.05, step=37)(training),
}
"""Faults of one step."""


def _a_matrix(model: torch.nn.Module) -> str:
    return [name for name, value in model.named_parameters() if value.dim() > 1][-1]


def _long(name: str, folder: Path, asked: argparse.Namespace) -> Iterator[Case]:
    turn = list(FAMILIES).index(name)
    optimizer = list(OPTIMIZERS)[turn % len(OPTIMIZERS)]

    def build(setup: Any) -> Any:
        training = FAMILIES[name](setup)
        training.optimizer = OPTIMIZERS[optimizer](training.model.parameters())
        return training

    right = Program(build, steps=40)
    for setting in (Setting(), Setting(mode="summary"), Setting(level="module")):
        about = "summary" if setting.mode == "summary" else setting.level
        if asked.settings and about not in asked.settings.split(","):
            continue
        record.record(folder / "cpu", right, "cpu", setting)
        for where in asked.devices.split(","):
            record.record(folder / where, right, where, setting)
            case = _guarded({"setting": f"{optimizer} {where} {about}"}, folder / "cpu", folder / where)
            yield case | {"failed": case["answer"] != "agrees"}
        for fault, plant in LATE.items():
            if not record.record(folder / "wrong", replace(right, plant=plant), "second", setting).struck:
                continue
            found = truth.find_truth(folder / "second", folder / "second", folder / "wrong")
            if not found.above:
                continue
            case = _guarded({"setting": f"{optimizer} {about}: {fault}"}, folder / "cpu", folder / "wrong")
            near = case["step"] == found.step and (found.outside or case["blamed"] in (*found.calls, *found.region))
            yield case | {"failed": not near, "truth": [found.step, *found.calls[:3]], "size": found.roundoffs}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", default="healthy,precision,fault")
    parser.add_argument("--only", default=",".join(FAMILIES))
    parser.add_argument("--settings", default="", help="levels, separated by commas; summary is one")
    parser.add_argument("--devices", default="second,npu", help="of the healthy pairs")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    record.import_all()
    waiting, cases, running = asked.only.split(","), [], []
    while waiting or running:
        while waiting and len(running) < asked.jobs:
            name, since = waiting.pop(0), time.monotonic()
            running.append((name, since, record.start(measure, name, asked)))
        name, since, started = running.pop(0)
        found = record.join(started)
        cases += found
        failed = [case for case in found if case["failed"]]
        print(f"{name:10} {len(found):3} cases, {len(failed):3} fail, {time.monotonic() - since:4.0f} s", flush=True)
    for case in cases:
        if case["failed"]:
            row = case["row"] or {}
            limits = (
                f"{row['slot']} {row['judged_by']} {row['measured']:.2e} > {row['allowed']:.2e}"
                if row
                else case["text"][-200:]
            )
            about = f"{case['family']:9} {case['setting']:24} {case['answer']:10} {case['status']:10}"
            print(about, case["blamed"], limits, case.get("truth", ""))
    for kind in asked.kinds.split(","):
        of_kind = [case for case in cases if case["kind"] == kind]
        words = Counter(case["setting"].partition(":")[0].split()[-1] for case in of_kind if case["failed"])
        print(f"{kind}: {sum(case['failed'] for case in of_kind)} of {len(of_kind)} fail {dict(words)}")
    if asked.json:
        asked.json.write_text(json.dumps(cases, indent=1))


if __name__ == "__main__":
    main()
