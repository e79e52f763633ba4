"""How small may an error be? For each op and kind of error, the least size that compare still names, across devices.

python -m bench.audit.sensitivity [--ops softmax,layer_norm] [--dtype float32] [--prove auto,off] [--json FILE]

Each op stands behind a product that the second device rounds otherwise, forward and backward. The result of one op is spoiled by
an error of decreasing size. A size counts if it and all greater ones are named exactly; `-` means that not even 0.3 is.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

import tensorprobe
from bench.audit.__main__ import run_here
from bench.audit.device import SecondDevice, Spoiler
from tensorprobe.engine import proof

OPS: dict[str, tuple[str, Callable[[Tensor], Tensor], str]] = {
    "linear": ("addmm", lambda x: F.linear(x, x.detach()[:32].contiguous(), x.detach()[0, :32].contiguous()), "Functional.linear.1"),
    "softmax": ("_softmax", lambda x: F.softmax(x, -1), "Functional.softmax.0"),
    "log_softmax": ("_log_softmax", lambda x: F.log_softmax(x, -1), "Functional.log_softmax.0"),
    "layer_norm": ("native_layer_norm", lambda x: F.layer_norm(x, (32,)), "Functional.layer_norm.0"),
    "group_norm": ("native_group_norm", lambda x: F.group_norm(x, 4), "Functional.group_norm.0"),
    "gelu": ("gelu", F.gelu, "Functional.gelu.0"),
    "silu": ("silu", F.silu, "Functional.silu.0"),
    "tanh": ("tanh", torch.tanh, "Torch.tanh.0"),
    "sigmoid": ("sigmoid", torch.sigmoid, "Torch.sigmoid.0"),
    "exp": ("exp", torch.exp, "Torch.exp.0"),
    "mean": ("mean.dim", lambda x: x.mean(-1), "Tensor.mean.0"),
    "rsqrt": ("rsqrt", lambda x: torch.rsqrt(x * x + 1), "Torch.rsqrt.0"),
    "mul": ("mul.Tensor", lambda x: x * x.detach(), "Tensor.mul.0"),
    "add": ("add.Tensor", lambda x: x + x.detach().roll(1), "Tensor.add.0"),
    "div": ("div.Tensor", lambda x: x / (x.detach() ** 2 + 1), "Tensor.div.0"),
    "cumsum": ("cumsum", lambda x: x.cumsum(-1), "Tensor.cumsum.0"),
    "gelu backward": ("gelu_backward", F.gelu, "Functional.gelu.0.backward"),
    "softmax backward": ("_softmax_backward_data", lambda x: F.softmax(x, -1), "Functional.softmax.0.backward"),
    "layer_norm backward": ("native_layer_norm_backward", lambda x: F.layer_norm(x, (32,)), "Functional.layer_norm.0.backward"),
}  # fmt: skip
SIZES = [10 ** (-half / 2) for half in range(1, 15)]


def kinds(size: float) -> dict[str, Spoiler]:
    source = torch.Generator().manual_seed(1)

    def one(result: Tensor) -> Tensor:
        flat = result.contiguous().view(-1)
        flat[flat.numel() // 3] += size * result.float().square().mean().sqrt().to(result.dtype)
        return flat.view(result.shape)

    return {
        "scale": lambda result: result * (1 + size),
        "bias": lambda result: result + size * result.float().square().mean().sqrt().to(result.dtype),
        "noise": lambda result: (
            result + (size * result.float() * torch.randn(result.shape, generator=source)).to(result.dtype)
        ),
        "element": one,
    }


def record(folder: Path, op: str, dtype: torch.dtype, device: SecondDevice | None) -> None:
    torch.manual_seed(7)
    x, weight = torch.randn(64, 48).to(dtype), torch.randn(32, 48).to(dtype).requires_grad_()
    with tensorprobe.capture(folder, level="api", in_process=True, stacks=False, overwrite=True):
        if device is not None:
            device.__enter__()
        try:
            held = OPS[op][1](F.linear(x, weight))
            (held.float() * torch.arange(1, held.numel() + 1).view(held.shape).sin()).sum().backward()
        finally:
            if device is not None:
                device.__exit__()


def least(op: str, kind: str, dtype: torch.dtype, prove: str, work: Path) -> float | None:
    """Return the least size that is named, or None."""
    found = None
    for size in SIZES:
        device = SecondDevice(OPS[op][0], kinds(size)[kind], nth=0)
        if op == "linear":
            device = SecondDevice(OPS[op][0], kinds(size)[kind])
        record(work / "wrong", op, dtype, device)
        if not device.struck:
            break
        said = tensorprobe.compare(work / "cpu", work / "wrong", prove=prove, keep_rows=False).divergence
        wanted = OPS[op][2] if OPS[op][2].endswith("backward") else f"{OPS[op][2]}.forward"
        if said is None or said.call != wanted:
            break
        found = size
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ops", default=",".join(OPS))
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--prove", default="off,auto")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    proof.run_in_processes = run_here  # type: ignore[assignment]
    dtype, rows = getattr(torch, options.dtype), {}
    ways = options.prove.split(",")
    print(f"{'op':20}", *(f"{kind + ' ' + way:>14}" for kind in kinds(1.0) for way in ways))
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        for op in options.ops.split(","):
            record(work / "cpu", op, dtype, None)
            found = [least(op, kind, dtype, way, work) for kind in kinds(1.0) for way in ways]
            rows[op] = found
            print(f"{op:20}", *(f"{'-' if each is None else format(each, '.1e'):>14}" for each in found), flush=True)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
