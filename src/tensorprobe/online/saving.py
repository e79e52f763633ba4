"""A call that failed, on disk: its inputs, what the device and the reference made of them, and a script that does it again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from tensorprobe.online.lifting import Arguments, lower
from tensorprobe.online.verdict import Case, Judged

_SCRIPT = '''"""{title}

Runs the call alone, on the device and on the CPU, with the inputs it had. Needs torch only.
    python {name} [DEVICE]
"""
import sys
from pathlib import Path

import torch

here = Path(__file__).parent
saved = torch.load(here / "tensors.pt", weights_only=True)
device = sys.argv[1] if len(sys.argv) > 1 else {device!r}
if device.startswith("npu"):
    try:
        import torch_npu  # noqa: F401
    except ImportError:
        from tensorprobe import sim
        sim.enable()


def tensor(slot, place, wide=False):
    value = saved[slot].clone().to(place)
    return value.double() if wide and value.is_floating_point() else value


def run(place, wide=False):
    def t(slot):
        return tensor(slot, place, wide)

    device = torch.device(place)  # noqa: F841
    args = {args}
    kwargs = {kwargs}
    result = {func}(*args, **kwargs)
    changed = {changed}
    return [one for one in (changed or (result if isinstance(result, (list, tuple)) else [result])) if one is not None]


for at, (here_, there) in enumerate(zip(run(device), run("cpu"))):
    a, b = here_.cpu().double(), there.double()
    same = torch.equal(here_.cpu(), there)
    how = "equal" if same else f"max abs error {{(a - b).abs().max().item():.3g}}"
    print(f"output {{at}}: {{tuple(a.shape)}} on {{device}} against the CPU: {{how}}")
'''


def save(case: Case, rows: list[Judged], folder: Path, title: str, device: str) -> None:
    """Write the folder: `tensors.pt` (read with weights_only), `replay.py`."""
    folder.mkdir(parents=True, exist_ok=True)
    own = lower(case.templates, case.lifted)
    tensors = {slot: tensor.detach().cpu() for slot, tensor in own.tensors()}
    for row in rows:
        tensors[f"device.{row.slot}"] = row.result.detach().cpu()
        if row.wide is not None:
            tensors[f"reference.{row.slot}"] = row.wide.detach().cpu()
    torch.save(tensors, folder / "tensors.pt")
    (folder / "replay.py").write_text(_script(case, own, title, device), encoding="utf-8")


def _script(case: Case, own: Arguments, title: str, device: str) -> str:
    plan = case.plan
    args = [_source(value, f"input.{at}") for at, value in enumerate(own.args)]
    kwargs = [f"{json.dumps(name)}: {_source(value, f'input.kwargs.{name}')}" for name, value in own.kwargs.items()]
    changed = [f"args[{at}]" if isinstance(at, int) else f"kwargs[{at!r}]" for at in sorted(plan.written, key=str)]
    flat = "[" + ", ".join(f"*({one} if isinstance({one}, list) else [{one}])" for one in changed) + "]"
    return _SCRIPT.format(
        title=title.replace('"""', "'''").replace("\\", "/"),
        name="replay.py",
        device=device,
        args="[" + ", ".join(args) + "]",
        kwargs="{" + ", ".join(kwargs) + "}",
        func=f"torch.ops.{case.func}",
        changed=flat if changed else "[]",
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
