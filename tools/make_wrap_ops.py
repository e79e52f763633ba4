"""Writes support_wrap_ops.yaml from what the installed torch offers, each op under the name that capture gives it.

python tools/make_wrap_ops.py            write the file
python tools/make_wrap_ops.py --check    exit 1 when the file is not what would be written
"""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from torch.nn import functional
from torch.overrides import get_ignored_functions, get_overridable_functions

from tensorprobe.legacy.msprobe.wrap_ops import GROUPS
from tensorprobe.sim import npu_ops
from tensorprobe.taps.plans import plan_aten, plan_function

OWN_FILE = Path(__file__).parents[1] / "compat" / "msprobe" / "pytorch" / "hook_module" / "support_wrap_ops.yaml"
HEAD = """\
# The APIs that torch {torch} offers, written by tools/make_wrap_ops.py.
# Whatever a program calls is recorded, listed here or not. To leave an API out, put a # before its line;
# to have it back, take the # away. A copy of this file can be named in the config instead.
"""
_SHIPPED = ("functional", "tensor", "torch", "_VF", "torch_npu", "distributed", "aten")
_CARRIERS = ("tensor", "input", "output")
"""How the arguments of a collective begin that carry its data."""


def render() -> str:
    """The text of the file."""
    ops = set(_api_ops()) | set(_collectives()) | set(_aten_ops()) | {f"NPU.{name}" for name in _npu_names()}
    parts = [HEAD.format(torch=torch.__version__.partition("+")[0])]
    for group in _SHIPPED:
        names = sorted(op.partition(".")[2] for op in ops if op.startswith(f"{GROUPS[group]}."))
        parts.append("\n".join([f"{group}:", *(f"  - {name}" for name in names)]) + "\n")
    return "\n".join(parts)


def _api_ops() -> Iterator[str]:
    """Functions, methods and operators that a function mode meets, by capture's own naming."""
    met: list[Any] = [func for functions in get_overridable_functions().values() for func in functions]
    met += [func for name, func in vars(functional).items() if callable(func) and not name.startswith("_")]
    # Factories take no tensor, and torch counts them among what cannot be overridden; a mode sees them.
    met += [func for func in get_ignored_functions() if _aten_packet(getattr(func, "__name__", "")) is not None]
    for func in met:
        if not inspect.isclass(func) and (name := plan_function(func).name) is not None and not name.startswith("Ops."):
            yield name


def _collectives() -> Iterator[str]:
    for name, func in vars(torch.distributed).items():
        if inspect.isfunction(func) and any(word.startswith(_CARRIERS) for word in inspect.signature(func).parameters):
            yield f"Distributed.{name}"


def _aten_ops() -> Iterator[str]:
    for full in torch._C._dispatch_get_all_op_names():
        name = full.partition("::")[2].partition(".")[0]
        packet = _aten_packet(name) if full.startswith("aten::") else None
        if packet is not None and any(plan_aten(getattr(packet, way)).name for way in packet.overloads()):
            yield f"Aten.{name}"


def _aten_packet(name: str) -> Any:
    packet = getattr(torch.ops.aten, name, None) if name else None
    return packet if isinstance(packet, torch._ops.OpOverloadPacket) else None


def _npu_names() -> Iterator[str]:
    """Those that the simulated device has: torch_npu itself need not be installed."""
    own = vars(npu_ops).items()
    return (name for name, func in own if inspect.isfunction(func) and name.startswith(("npu_", "fast_")))


def main() -> int:
    warnings.simplefilter("ignore")  # asking torch for its deprecated functions is no use of them
    text = render()
    if "--check" in sys.argv[1:]:
        return int(not OWN_FILE.is_file() or OWN_FILE.read_text(encoding="utf-8") != text)
    OWN_FILE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
