# ruff: noqa: T201
"""The fixed part of every replay script: run one call again, on a device and on a reference, and compare the two.

The text of this file is copied into scripts that stand alone, so it imports torch and Python's own modules only. A script adds
`CASE`, which describes the call as plain data, and `call`, which makes it. Exit codes: 1 while the device is wrong, 0 once it
is right, 2 if that cannot be decided.
"""

import argparse
import contextlib
import importlib
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

Tensors = dict[str, torch.Tensor]
DTYPES = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "I16": "int16", "U16": "uint16", "I32": "int32", "U32": "uint32",
    "I64": "int64", "U64": "uint64", "F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz",
}  # fmt: skip


def load(path: Path, case: dict[str, Any]) -> Tensors:
    """Return the tensors of a .safetensors file, with the strides they had."""
    raw = bytearray(path.read_bytes())
    start = 8 + int.from_bytes(raw[:8], "little")
    stored = {}
    for name, entry in json.loads(raw[8:start]).items():
        dtype, count = getattr(torch, DTYPES[entry["dtype"]]), math.prod(entry["shape"])
        flat = (
            torch.frombuffer(raw, dtype=dtype, count=count, offset=start + entry["data_offsets"][0]) if count else None
        )
        stored[name] = (torch.empty(0, dtype=dtype) if flat is None else flat.clone()).reshape(entry["shape"])
    for name in case["complex"]:
        stored[name] = torch.view_as_complex(stored[name].unflatten(-1, (-1, 2)))
    for name, (shape, stride) in case["layouts"].items():  # stored as the memory that they span
        stored[name] = stored[name].as_strided(shape, stride)
    return stored


def run(
    case: dict[str, Any], call: Callable[..., Any], stored: Tensors, device: str, *, wide: bool = False, seed: int = 0
) -> Tensors:
    """Return outputs (`output.0`) and gradients (`d input.0`) of the call, on the host."""
    wider = {getattr(torch, narrow): getattr(torch, other) for narrow, other in case["wide"].items()} if wide else {}

    def dtype(given: torch.dtype) -> torch.dtype:
        return wider.get(given, given)

    inputs = {}
    for name, value in stored.items():
        if not name.startswith(("device.", "gradient.", "reference.")):
            place = "cpu" if name in case["on_host"] else device
            # Move the memory and apply the strides again: a plain copy would be contiguous.
            block = value.as_strided((span(value),), (1,))
            if wide and case["autocast"] and value.dtype is torch.float32:  # it rounds what it is given
                block = block.to(getattr(torch, case["autocast"]))
            block = block.to(dtype(value.dtype)).to(place)
            inputs[name] = block.clone().as_strided(value.shape, value.stride()).requires_grad_(name in case["grads"])
    given = inputs
    if case["mutates"]:  # a leaf that requires a gradient cannot be changed in place, but a copy can
        given = {name: own_copy(x) if x.requires_grad else x for name, x in inputs.items()}
    torch.manual_seed(seed)
    with contextlib.ExitStack() as stack:
        if case["autocast"] and not wide:
            stack.enter_context(torch.autocast(torch.device(device).type, dtype=getattr(torch, case["autocast"])))
        stack.enter_context(torch.set_grad_enabled(bool(case["grads"])))
        result = call(given, torch.device(device), dtype)
    outputs = dict(tensors_in(result, "output.0" if isinstance(result, torch.Tensor) else "output"))
    if isinstance(result, (bool, int, float)):
        outputs["output.0"] = torch.tensor(result)
    outputs |= {name: given[argument] for name, argument in case["changed"].items()}
    found = {name: host(output) for name, output in outputs.items()}
    coming = {name: stored[f"gradient.{name}"] for name in outputs if f"gradient.{name}" in stored}
    leaves = {name: leaf for name, leaf in inputs.items() if leaf.requires_grad}
    if coming and leaves:
        moved = [gradient.to(outputs[name].dtype).to(outputs[name].device) for name, gradient in coming.items()]
        gradients = torch.autograd.grad(
            [outputs[name] for name in coming], list(leaves.values()), moved, allow_unused=True
        )
        found |= {f"d {name}": host(each) for name, each in zip(leaves, gradients, strict=True) if each is not None}
    return found


def span(value: torch.Tensor) -> int:
    """Return how many elements of memory a tensor spans."""
    return 1 + sum((n - 1) * s for n, s in zip(value.shape, value.stride(), strict=True)) if value.numel() else 0


def own_copy(value: torch.Tensor) -> torch.Tensor:
    """Return a copy that gradients flow through, with the same strides."""
    if span(value) <= value.numel():
        return value.clone()
    gaps = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)  # not a view
    gaps.as_strided((span(value),), (1,)).zero_()
    return gaps.copy_(value)


def tensors_in(value: Any, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor of a result with its name."""
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, (list, tuple)):
        for place, part in enumerate(value):
            yield from tensors_in(part, f"{name}.{place}")
    elif isinstance(value, dict):
        for key, part in value.items():
            yield from tensors_in(part, f"{name}.{key}")


def host(tensor: torch.Tensor) -> torch.Tensor:
    """Return a plain copy on the CPU."""
    if tensor.dtype is torch.complex32:  # torch has few kernels for it
        tensor = tensor.to(torch.complex64)
    return tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()


def measure(wide: torch.Tensor, result: torch.Tensor) -> dict[str, float]:
    """Return the figures of a result against the reference. `d` is the difference where both are finite."""
    ideal = wide.to(result.dtype)  # the reference, rounded
    same = (ideal == result) | (ideal.isnan() & result.isnan())
    figures: dict[str, float] = {
        "different": int((~same).sum()), "bit_identical": float(not torch.equal(ideal, result))
    }  # fmt: skip
    if not (result.is_floating_point() or result.is_complex()):
        return figures
    if wide.is_floating_point():  # limited to the range of the dtype: too large becomes inf, too small is rounded
        edge = ideal.isinf() | (wide.abs() < torch.finfo(result.dtype).tiny)
        wide = torch.where(edge, ideal.to(wide.dtype), wide)
    parts = [torch.view_as_real(x) if x.is_complex() else x for x in (wide, result, ideal)]
    a, b, rounded = (part.double().flatten() for part in parts)
    finite = a.isfinite() & b.isfinite()
    equal = (a == b) | (rounded == b) | (a.isnan() & b.isnan())
    figures["nonfinite_different"] = int((~finite & ~equal).sum())
    a, b = a[finite], b[finite]
    d, n = b - a, max(int(finite.sum()), 1)
    size = float(a.norm())
    relative = torch.where(d == 0, torch.zeros_like(d), d.abs() / a.abs())
    figures["max_abs"] = float(d.abs().max()) if len(d) else 0.0
    figures["max_rel"] = float(relative.max()) if len(d) else 0.0
    # The largest error beyond the rounding of the element.
    beyond = d.abs() - torch.finfo(result.dtype).eps * a.abs()
    figures["beyond_rounding"] = max(0.0, float(beyond.max())) if len(d) else 0.0
    figures["relative_l2"] = float(d.norm()) / size if size else (math.inf if float(d.norm()) else 0.0)
    product = size * float(b.norm())
    figures["one_minus_cosine"] = max(0.0, 1 - float(a @ b) / product) if product else float(size != float(b.norm()))
    for name, limit in (("1e2", 1e-2), ("1e3", 1e-3), ("1e4", 1e-4)):
        figures[f"over_{name}"] = int((relative > limit).sum())
        figures[f"share_over_{name}"] = figures[f"over_{name}"] / n
    # A common factor or offset counts from 8 standard errors on.
    along = float(a @ d) / size if size else 0.0
    figures["slope"] = abs(along / size) if size and sure(along, d, n) else 0.0
    figures["bias"] = abs(float(d.sum()) / n) if sure(float(d.sum()) / n**0.5, d, n) else 0.0
    if result.dtype in (torch.float16, torch.bfloat16, torch.float32):
        whole = torch.int32 if result.dtype is torch.float32 else torch.int16
        ordered = [x.view(whole).long() for x in (ideal, result)]
        steps = [torch.where(x < 0, torch.iinfo(whole).min - x, x) for x in ordered]
        figures["ulp_max"] = float((steps[0] - steps[1]).abs().max()) if result.numel() else 0.0
    return figures


def sure(part: float, d: torch.Tensor, n: int) -> bool:
    """Return whether a trend is more than chance."""
    rest = float(d @ d) - part * part
    return n > 1 and part != 0 and (rest <= 1e-13 * float(d @ d) or abs(part) > 8 * (rest / (n - 1)) ** 0.5)


def comparable(
    case: dict[str, Any], stored: Tensors, name: str, wide: torch.Tensor, result: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what is compared: the values that indices pick, vectors in the phase of the reference."""
    if name in case["choices"]:
        source, dim = stored["input.0"], case["choices"][name]
        if dim is None or not source.ndim:
            return source.flatten()[wide.flatten()], source.flatten()[result.flatten()]
        full = [index if index.ndim == source.ndim else index.unsqueeze(dim) for index in (wide, result)]
        return torch.take_along_dim(source, full[0], dim), torch.take_along_dim(source, full[1], dim)
    if name in case["vectors"]:
        lean = (wide.conj() * result.to(wide.dtype)).sum(case["vectors"][name], keepdim=True)
        result = (result.to(wide.dtype) / torch.where(lean.abs() > 0, lean / lean.abs(), 1.0)).to(result.dtype)
    return wide, result


def slot(name: str) -> str:
    """Return the name that a run has for a result: the gradient of an input is an output of the backward."""
    return f"backward {name[2:].replace('input', 'output', 1)}" if name.startswith("d ") else name


def judge(case: dict[str, Any], stored: Tensors, results: Tensors, reference: Tensors, device: str) -> bool:
    """Print the figures, and return whether one exceeds its limit."""
    failed = False
    for name, limits in case["limits"].items():
        if name not in results or name not in reference or results[name].shape != reference[name].shape:
            shapes = [list(each[name].shape) if name in each else None for each in (results, reference)]
            print(f"{slot(name):<24} FAILS: shape {shapes[0]} on {device}, {shapes[1]} on the reference")
            failed = True
            continue
        figures = measure(*comparable(case, stored, name, reference[name], results[name]))
        over = [key for key, allowed in limits.items() if not figures.get(key, 0.0) <= allowed]
        failed = failed or bool(over)
        print(f"{slot(name):<24} {'FAILS' if over else 'ok'}")
        shown = ["max_abs", "relative_l2", "one_minus_cosine", *limits]
        for key in dict.fromkeys(key for key in shown if key in figures):
            allowed = f"allowed {limits[key]:.4g}" if key in limits else ""
            print(f"    {key:<20} {figures[key]:<12.4g} {allowed:<20} {'<-- over' if key in over else ''}".rstrip())
        then = stored.get(f"device.{name}" if not name.startswith("d ") else f"device.gradient.output{name[7:]}")
        if then is not None and then.shape == reference[name].shape and "max_abs" in figures:
            before = measure(*comparable(case, stored, name, reference[name], then))
            print(f"    when it was recorded: max_abs {before['max_abs']:.4g}, relative_l2 {before['relative_l2']:.4g}")
    return failed


def judge_samples(case: dict[str, Any], stored: Tensors, drawn: list[Tensors], other: list[Tensors]) -> bool:
    """Print the distributions of random numbers on the device and the CPU, and return whether they differ."""
    failed = False
    compare = {"samples": compare_samples, "runs": compare_runs, "dropout": compare_dropout}[case["sampling"]["kind"]]
    for name in case["limits"]:
        one, two = (torch.stack([each[name] for each in runs]).double() for runs in (drawn, other))
        if not one.numel():
            continue
        found = {"mean": (one.mean(), two.mean()), "size": (one.square().mean().sqrt(), two.square().mean().sqrt()),
                 "share of zeros": ((one == 0).double().mean(), (two == 0).double().mean())}  # fmt: skip
        for key, (here, there) in found.items():
            print(f"{name:<24} {key:<16} {float(here):<12.4g} on the CPU {float(there):.4g}")
        for key, measured, allowed in compare(case, stored, one, two):
            over = not measured <= allowed
            print(f"{name:<24} {key:<16} {measured:<12.4g} allowed {allowed:.4g} {'<-- over' if over else ''}".rstrip())
            failed = failed or over
    return failed


Compared = Iterator[tuple[str, float, float]]


def compare_samples(case: dict[str, Any], stored: Tensors, one: torch.Tensor, two: torch.Tensor) -> Compared:
    """Yield the Kolmogorov-Smirnov distance of the two distributions, with its limit at odds of a million to one."""
    one, two = (sample.flatten().sort().values for sample in (one, two))
    every = torch.cat((one, two)).sort().values
    shares = [torch.searchsorted(sample, every, right=True) / len(sample) for sample in (one, two)]
    yield "distance", float((shares[0] - shares[1]).abs().max()), 2.694 * math.sqrt(1 / len(one) + 1 / len(two))


def compare_runs(case: dict[str, Any], stored: Tensors, one: torch.Tensor, two: torch.Tensor) -> Compared:
    """Yield mean and size of whole runs, in standard errors: one draw decides over many elements."""
    for key, figure in (("means apart", torch.mean), ("sizes apart", lambda run: run.square().mean().sqrt())):
        here, there = (torch.stack([figure(run) for run in runs]) for runs in (one, two))
        error = math.sqrt(float(here.var() + there.var()) / len(here)) + 1e-6 * float(there.abs().max())
        yield key, float((here.mean() - there.mean()).abs()) / error if error else 0.0, 8.0


def compare_dropout(case: dict[str, Any], stored: Tensors, one: torch.Tensor, two: torch.Tensor) -> Compared:
    """Yield for dropout the share of zeros, with p, and how far the rest is from the scaled input."""
    p, x = case["sampling"]["p"], stored["input.0"].double().expand(one.shape)
    there = x != 0
    n = max(int(there.sum()), 1)
    share = float(((one == 0) & there).sum()) / n
    yield "zeros off, in standard errors", abs(share - p) / math.sqrt(max(p * (1 - p), 1 / n) / n), 6.0
    kept = (one != 0) & there & (x.abs() > torch.finfo(stored["input.0"].dtype).tiny)
    if kept.any():
        off = float(((one[kept] - x[kept] / (1 - p)).abs() / x[kept].abs()).max())
        yield "scale off", off, 4 * torch.finfo(stored["input.0"].dtype).eps / (1 - p)


def main(case: dict[str, Any], call: Callable[..., Any], file: str) -> int:
    """Run the call on the device and on the reference, print the figures, and return the exit code."""
    parser = argparse.ArgumentParser(
        description="Exit codes: 1 while it fails, 0 once it passes, 2 if it cannot be decided."
    )
    parser.add_argument("--device", default=case["device"])
    device = parser.parse_args().device
    lacking = ""
    try:
        for package in case["imports"]:
            lacking = f"module {package} cannot be imported"
            importlib.import_module(package)
        lacking = f"there is no device {device}"
        torch.empty(1, device=device)
    except Exception as error:
        print(f"cannot tell: {lacking} here ({first_line(error)})")
        return 2
    try:
        stored = load(Path(file).with_suffix(".safetensors"), case)
        count = case["sampling"]["runs"] if case["sampling"] else 0
        other = [run(case, call, stored, "cpu", seed=2 * number + 1) for number in range(count)]
        reference = {name[10:]: tensor for name, tensor in stored.items() if name.startswith("reference.")}
        if not count and not reference:
            reference = run(case, call, stored, "cpu", wide=True)
    except Exception as error:
        print(f"cannot decide: the reference cannot be computed ({type(error).__name__}: {first_line(error)})")
        return 2
    try:
        if count:
            drawn = [run(case, call, stored, device, seed=2 * number) for number in range(count)]
            failed = judge_samples(case, stored, drawn, other)
        else:
            failed = judge(case, stored, run(case, call, stored, device), reference, device)
    except Exception as error:
        print(f"FAILS: it raises on {device}: {type(error).__name__}: {error}")
        return 1
    print(f"FAILS on {device}" if failed else f"within the limits on {device}")
    return int(failed)


def first_line(error: Exception) -> str:
    """Return the first line of an exception."""
    return (str(error).splitlines() or [""])[0]
