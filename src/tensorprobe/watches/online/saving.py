"""A call that failed, on disk: its inputs, what the device and the reference made of them, and a script that does it again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from tensorprobe.watches.online.lifting import Arguments, lower
from tensorprobe.watches.online.verdict import Case, Judged

_SCRIPT = '''"""{title}

Runs the call alone, with the inputs it had, and compares with the reference and with what the device gave then.
Needs torch only.
    python replay.py [DEVICE]
"""
import sys
from pathlib import Path

import torch

saved = torch.load(Path(__file__).parent / "tensors.pt", weights_only=True)
slots = {slots}
place = sys.argv[1] if len(sys.argv) > 1 else {device!r}
if place.startswith("npu"):
    try:
        import torch_npu  # noqa: F401
    except ImportError:
        from tensorprobe import sim

        sim.enable()
device = torch.device(place)


def t(slot):
    return saved[slot].clone().to(device)


def run():
    args = {args}
    kwargs = {kwargs}
    result = {func}(*args, **kwargs)
    outputs = []
    for one in flat([result, {changed}]):
        if not any(one is other for other in outputs):
            outputs.append(one)
    return outputs


def flat(value):
    if isinstance(value, (list, tuple)):
        return [one for each in value for one in flat(each)]
    return [value] if isinstance(value, torch.Tensor) else []


def difference(one, other):
    if one.shape != other.shape:
        return f"shape {{list(one.shape)}} instead of {{list(other.shape)}}"
    wide = torch.complex128 if one.is_complex() else torch.float64
    error = (one.to(wide) - other.to(wide)).abs().nan_to_num(nan=float("inf"), posinf=float("inf"))
    error[one.isnan() & other.isnan() | (one == other)] = 0
    return f"max abs error {{error.max().item() if error.numel() else 0.0:.3g}}"


for slot, now in zip(slots, run()):
    now, then, reference = now.cpu(), saved["device." + slot], saved.get("reference." + slot)
    if reference is None:
        print(f"{{slot}}: {{list(now.shape)}} on {{device}}; the reference has no such output")
        continue
    print(f"{{slot}}: {{list(now.shape)}} against the reference:")
    print(f"  when it was watched   {{difference(then, reference)}}")
    print(f"  now, on {{device!s:13}} {{difference(now, reference)}}")
'''


def save(case: Case, rows: list[Judged], folder: Path, title: str) -> None:
    """Write the folder: `tensors.pt` (read with weights_only), `replay.py`."""
    folder.mkdir(parents=True, exist_ok=True)
    own = lower(case.templates, case.lifted)
    # A clone: of a slice torch.save would write all that it is a slice of.
    tensors = {slot: tensor.detach().cpu().clone() for slot, tensor in own.tensors()}
    for row in rows:
        tensors[f"device.{row.slot}"] = row.result.detach().cpu().clone()
        if row.wide is not None:
            tensors[f"reference.{row.slot}"] = row.wide.detach().cpu().clone()
    torch.save(tensors, folder / "tensors.pt")
    (folder / "replay.py").write_text(_script(case, own, title), encoding="utf-8")


def _script(case: Case, own: Arguments, title: str) -> str:
    plan = case.plan
    args = [_source(value, f"input.{at}") for at, value in enumerate(own.args)]
    kwargs = [f"{json.dumps(name)}: {_source(value, f'input.kwargs.{name}')}" for name, value in own.kwargs.items()]
    changed = [
        f"args[{at}]" if isinstance(at, int) else f"kwargs[{at!r}]"
        for at in sorted(plan.written, key=str)
        if own[at] is not None
    ]
    return _SCRIPT.format(
        title=title.replace('"""', "'''").replace("\\", "/"),
        slots=list(case.results),
        device=case.device,
        args="[" + ", ".join(args) + "]",
        kwargs="{" + ", ".join(kwargs) + "}",
        func=f"torch.ops.{case.func}",
        changed=", ".join(changed),
    )


def _source(value: Any, slot: str) -> str:
    """An argument as Python."""
    if isinstance(value, torch.Tensor):
        return f"t({slot!r})"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_source(each, f"{slot}.{at}") for at, each in enumerate(value)) + "]"
    if isinstance(value, torch.device):
        return "device"
    if (isinstance(value, float) and value != value) or value in (float("inf"), float("-inf")):
        return f"float({str(value)!r})"
    return repr(value)
