"""The text of a standalone replay script: one call, its device and its reference, its measurement, its limits.

The script needs torch and safetensors and nothing of ours. It is put together from a template; parts that a call has no use
for (strides, autocast, changed arguments, choices among ties) are left out, so that a reader finds what concerns him.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from string import Template
from typing import Any, Literal

LIMIT_NAMES = (
    "relative_l2", "max_abs", "one_minus_cosine", "slope", "bias", "different", "nonfinite_different", "bit_identical",
    "ulp_max", "beyond_rounding", "over_1e2", "over_1e3", "share_over_1e3", "share_over_1e4",
)  # fmt: skip
"""The figures that a script can measure."""


@dataclass(frozen=True)
class Sampling:
    """How random results are compared, and in how many runs. `p` is that of dropout."""

    kind: Literal["samples", "runs", "dropout"]
    runs: int
    p: float = 0.0


@dataclass(frozen=True, kw_only=True)
class ScriptParts:
    """What a script says of its call. Slots are those of the record."""

    about: Sequence[str]
    """Lines of comment: what failed, where it was recorded."""
    device: str
    source: str
    """The call as an expression."""
    imports: Sequence[str] = ()
    wide: Mapping[str, str]
    """A dtype → that of the reference, both as `torch.float32`."""
    layouts: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=dict)
    """Shape and stride of tensors that are not contiguous."""
    complex_slots: Sequence[str] = ()
    grads: Sequence[str] = ()
    on_host: Sequence[str] = ()
    changed: Mapping[str, str] = field(default_factory=dict)
    mutates: bool = False
    autocast: str | None = None
    choices: Mapping[str, int | None] = field(default_factory=dict)
    vectors: Mapping[str, int] = field(default_factory=dict)
    limits: Mapping[str, Mapping[str, float]]
    """`output.0`, or `d input.0` for a gradient → figure → what is allowed."""
    sampling: Sampling | None = None
    """Set for ops that draw random numbers; the limits then only name what is looked at."""


def render(parts: ScriptParts) -> str:
    """The whole script."""
    values = {
        "about": "\n".join(f"# {_one_line(line)}" for line in parts.about),
        "imports": "".join(f"import {name}\n" for name in parts.imports),
        "device": parts.device,
        "wide": _literal({_Raw(key): _Raw(value) for key, value in parts.wide.items()}),
        "grads": list(parts.grads),
        "limits": _literal(dict(parts.limits)),
        "source": parts.source,
        "layouts": "",
        "restride": "",
        "place": "",
        "working": "",
        "changed": "",
        "context": "",
    }
    if parts.layouts or parts.complex_slots:
        values["layouts"] = _LAYOUTS.substitute(
            layouts=_literal(dict(parts.layouts)), complex_slots=list(parts.complex_slots)
        )
        values["restride"] = _RESTRIDE
    if parts.on_host:
        values["place"] = f' if name not in {list(parts.on_host)} else "cpu"'
    if parts.mutates:
        values["working"] = _WORKING
        values["changed"] = _CHANGED.substitute(changed=dict(parts.changed)) if parts.changed else ""
    if parts.autocast is not None:
        values["context"] = _AUTOCAST.substitute(dtype=parts.autocast)
    values["judging"] = _judging(parts)
    return _SCRIPT.substitute({key: str(value) for key, value in values.items()})


def _judging(parts: ScriptParts) -> str:
    if parts.sampling is not None:
        comparing = {
            "samples": _COMPARE_SAMPLES,
            "runs": _COMPARE_RUNS,
            "dropout": _COMPARE_DROPOUT.substitute(p=parts.sampling.p),
        }[parts.sampling.kind]
        return _SAMPLING.substitute(runs=parts.sampling.runs, comparing=comparing)
    aside = _CHOICES.substitute(choices=dict(parts.choices)) if parts.choices else ""
    aside += _VECTORS.substitute(vectors=dict(parts.vectors)) if parts.vectors else ""
    ulp = _ULP if any("ulp_max" in each for each in parts.limits.values()) else ""
    beyond = _BEYOND if any("beyond_rounding" in each for each in parts.limits.values()) else ""
    return _MEASURING.substitute(aside=aside, ulp=ulp, beyond=beyond)


class _Raw(str):
    """Text that stands in a literal as it is."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def _literal(value: Any) -> str:
    """A dict as source, one entry a line; infinities as Python can read them."""
    if not value:
        return "{}"
    lines = [f"    {key!r}: {_inner(entry)}," for key, entry in value.items()]
    return "{\n" + "\n".join(lines) + "\n}"


def _inner(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key!r}: {_inner(entry)}" for key, entry in value.items()) + "}"
    return f'float("{value}")' if isinstance(value, float) and value in (float("inf"), float("-inf")) else repr(value)


def _one_line(text: str) -> str:
    """Text of a foreign run as one line of comment."""
    return "".join(letter if letter.isprintable() else " " for letter in text)


_SCRIPT = Template('''\
$about
#
#     python THIS_FILE [--device $device]      exit 1 while it fails, 0 once it does not
#
# Runs the call with the tensors of the .safetensors file beside this one: on the device, and on the CPU in a wider dtype,
# forward and backward. Prints how far the two are apart. Needs torch and safetensors.
import argparse
import math
import sys
from pathlib import Path

import torch
${imports}\
from safetensors.torch import load_file

GRADS = $grads  # inputs that require a gradient
WIDE = $wide  # what the reference computes in
# What is allowed, for each output and for the gradient (d) of each input.
LIMITS = $limits
${layouts}\


def call(t, device, dtype):
    return $source


def load(path):
    stored = load_file(path)
${restride}\
    return stored


def run(stored, device, wide, seed=0):
    """Outputs and gradients by name; `wide` says which dtypes become which."""
    def dtype(given):
        return wide.get(given, given)

    inputs = {}
    for name, value in stored.items():
        if not name.startswith(("device.", "gradient.")):
            place = device$place
            # The block of memory is moved and strided again: a plain copy would be contiguous.
            block = value.as_strided((span(value),), (1,)).to(dtype(value.dtype)).to(place)
            inputs[name] = block.clone().as_strided(value.shape, value.stride()).requires_grad_(name in GRADS)
    t = inputs
${working}\
    torch.manual_seed(seed)
    with ${context}\
torch.set_grad_enabled(bool(GRADS)):
        result = call(t, device, dtype)
    outputs = dict(tensors_in(result, "output.0" if isinstance(result, torch.Tensor) else "output"))
    if isinstance(result, (bool, int, float)):
        outputs["output.0"] = torch.tensor(result)
${changed}\
    found = {name: host(output) for name, output in outputs.items()}
    given = {name: stored[f"gradient.{name}"] for name in outputs if f"gradient.{name}" in stored}
    leaves = {name: leaf for name, leaf in inputs.items() if leaf.requires_grad}
    if given and leaves:
        coming = [gradient.to(outputs[name].dtype).to(outputs[name].device) for name, gradient in given.items()]
        gradients = torch.autograd.grad([outputs[name] for name in given], list(leaves.values()), coming, allow_unused=True)
        found |= {f"d {name}": host(each) for name, each in zip(leaves, gradients) if each is not None}
    return found


def span(value):
    """How many elements of memory a tensor spans."""
    return 1 + sum((n - 1) * s for n, s in zip(value.shape, value.stride())) if value.numel() else 0


def tensors_in(value, name):
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, (list, tuple)):
        for place, part in enumerate(value):
            yield from tensors_in(part, f"{name}.{place}")
    elif isinstance(value, dict):
        for key, part in value.items():
            yield from tensors_in(part, f"{name}.{key}")


def host(tensor):
    if tensor.dtype is torch.complex32:  # which torch can hardly compute with
        tensor = tensor.to(torch.complex64)
    return tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()


$judging
def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="$device")
    device = parser.parse_args().device
    try:
        torch.empty(1, device=device)
    except Exception as error:
        print(f"cannot tell: there is no device {device} here ({str(error).splitlines()[0]})")
        return 2
    stored = load(Path(__file__).with_suffix(".safetensors"))
    try:
        failed = judge(stored, device)
    except Exception as error:
        print(f"FAILS: it raises on {device}: {type(error).__name__}: {error}")
        return 1
    print(f"FAILS on {device}" if failed else f"within the limits on {device}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
''')
_MEASURING = Template('''\
def measure(wide, result):
    """Figures of a result against the reference. d is the difference where both are finite."""
    floating = result.is_floating_point() or result.is_complex()
    ideal = wide.to(result.dtype)  # the reference, rounded
    same = (ideal == result) | (ideal.isnan() & result.isnan())
    figures = {"different": int((~same).sum()), "bit_identical": float(not torch.equal(ideal, result))}
    if not floating:
        return figures
    if wide.is_floating_point():  # as far as the dtype can follow: too large is infinite, too small is rounded
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
${beyond}\
    figures["relative_l2"] = float(d.norm()) / size if size else (math.inf if float(d.norm()) else 0.0)
    product = size * float(b.norm())
    figures["one_minus_cosine"] = max(0.0, 1 - float(a @ b) / product) if product else float(size != float(b.norm()))
    for name, edge in (("1e2", 1e-2), ("1e3", 1e-3), ("1e4", 1e-4)):
        figures[f"over_{name}"] = int((relative > edge).sum())
        figures[f"share_over_{name}"] = figures[f"over_{name}"] / n
    # A factor or an offset throughout: counts when it is 8 standard errors large.
    along = float(a @ d) / size if size else 0.0
    figures["slope"] = abs(along / size) if size and sure(along, d, n) else 0.0
    figures["bias"] = abs(float(d.sum()) / n) if sure(float(d.sum()) / n**0.5, d, n) else 0.0
${ulp}\
    return figures


def sure(part, d, n):
    rest = float(d @ d) - part * part
    return n > 1 and part != 0 and (rest <= 1e-13 * float(d @ d) or abs(part) > 8 * (rest / (n - 1)) ** 0.5)


def judge(stored, device):
    """Print what was measured; whether something is over its limit."""
    reference = run(stored, "cpu", WIDE)
    results = run(stored, device, {})
    failed = False
    for name, limits in LIMITS.items():
        if name not in results or name not in reference or results[name].shape != reference[name].shape:
            shapes = [list(each[name].shape) if name in each else None for each in (results, reference)]
            print(f"{name:<24} FAILS: shape {shapes[0]} on {device}, {shapes[1]} on the reference")
            failed = True
            continue
        wide, result = reference[name], results[name]
${aside}\
        figures = measure(wide, result)
        over = [key for key, allowed in limits.items() if not figures.get(key, 0.0) <= allowed]
        failed = failed or bool(over)
        print(f"{name:<24} {'FAILS' if over else 'ok'}")
        shown = ["max_abs", "relative_l2", "one_minus_cosine", *limits]
        for key in dict.fromkeys(key for key in shown if key in figures):
            allowed = f"allowed {limits[key]:.4g}" if key in limits else ""
            print(f"    {key:<20} {figures[key]:<12.4g} {allowed:<20} {'<-- over' if key in over else ''}".rstrip())
    return failed

''')
_SAMPLING = Template('''\
RUNS = $runs  # a distribution shows only in many numbers


def judge(stored, device):
    """It draws random numbers: print how those of the device are distributed beside those of the CPU."""
    drawn, other = ([run(stored, place, {}, seed=2 * k + at) for k in range(RUNS)] for at, place in enumerate((device, "cpu")))
    failed = False
    for name in LIMITS:
        one, two = (torch.stack([each[name] for each in runs]).double() for runs in (drawn, other))
        if not one.numel():
            continue
        found = {"mean": (one.mean(), two.mean()), "size": (one.square().mean().sqrt(), two.square().mean().sqrt()),
                 "share of zeros": ((one == 0).double().mean(), (two == 0).double().mean())}
        for key, (here, there) in found.items():
            print(f"{name:<24} {key:<16} {float(here):<12.4g} on the CPU {float(there):.4g}")
        for key, measured, allowed in compare(stored, name, one, two):
            print(f"{name:<24} {key:<16} {measured:<12.4g} allowed {allowed:.4g} {'<-- over' if measured > allowed else ''}".rstrip())
            failed = failed or not measured <= allowed
    return failed


$comparing
''')
_COMPARE_SAMPLES = """\
def compare(stored, name, one, two):
    \"\"\"The distance of the two distributions (Kolmogorov and Smirnov), at odds of a million to one.\"\"\"
    one, two = (sample.flatten().sort().values for sample in (one, two))
    every = torch.cat((one, two)).sort().values
    shares = [torch.searchsorted(sample, every, right=True) / len(sample) for sample in (one, two)]
    yield "distance", float((shares[0] - shares[1]).abs().max()), 2.694 * math.sqrt(1 / len(one) + 1 / len(two))
"""
_COMPARE_RUNS = """\
def compare(stored, name, one, two):
    \"\"\"Mean and size of whole runs, in standard errors: one draw decides over many elements.\"\"\"
    for key, figure in (("means apart", torch.mean), ("sizes apart", lambda run: run.square().mean().sqrt())):
        here, there = (torch.stack([figure(run) for run in runs]) for runs in (one, two))
        error = math.sqrt(float(here.var() + there.var()) / len(here)) + 1e-6 * float(there.abs().max())
        yield key, float((here.mean() - there.mean()).abs()) / error if error else 0.0, 8.0
"""
_COMPARE_DROPOUT = Template("""\
def compare(stored, name, one, two):
    \"\"\"Dropout: the share of zeros beside p, and what is left beside the scaled input.\"\"\"
    p, x = $p, stored["input.0"].double().expand(one.shape)
    there = x != 0
    n = max(int(there.sum()), 1)
    share = float(((one == 0) & there).sum()) / n
    yield "zeros off, in standard errors", abs(share - p) / math.sqrt(max(p * (1 - p), 1 / n) / n), 6.0
    kept = (one != 0) & there & (x.abs() > torch.finfo(stored["input.0"].dtype).tiny)
    if kept.any():
        off = float(((one[kept] - x[kept] / (1 - p)).abs() / x[kept].abs()).max())
        yield "scale off", off, 4 * torch.finfo(stored["input.0"].dtype).eps / (1 - p)
""")
_BEYOND = """\
    # The greatest error beyond what rounding that very element makes.
    beyond = d.abs() - torch.finfo(result.dtype).eps * a.abs()
    figures["beyond_rounding"] = max(0.0, float(beyond.max())) if len(d) else 0.0
"""
_ULP = """\
    if result.dtype in (torch.float16, torch.bfloat16, torch.float32):
        whole = torch.int32 if result.dtype is torch.float32 else torch.int16
        steps = [torch.where(x < 0, torch.iinfo(whole).min - x.long(), x.long()) for x in (ideal.view(whole), result.view(whole))]
        figures["ulp_max"] = float((steps[0] - steps[1]).abs().max()) if result.numel() else 0.0
"""
_LAYOUTS = Template("""\
# Tensors that are not contiguous are stored as the block of memory they span: shape and stride.
LAYOUTS = $layouts
COMPLEX = $complex_slots  # stored as real and imaginary parts
""")
_RESTRIDE = """\
    for name in COMPLEX:
        stored[name] = torch.view_as_complex(stored[name].unflatten(-1, (-1, 2)))
    for name, (shape, stride) in LAYOUTS.items():
        stored[name] = stored[name].as_strided(shape, stride)
"""
_WORKING = """\
    # The call changes its arguments: it gets copies of those that gradients are wanted for.
    t = {n: torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device).copy_(x) if x.requires_grad else x
         for n, x in inputs.items()}
"""
_CHANGED = Template("""\
    for name, argument in $changed.items():  # arguments as the call left them
        outputs[name] = t[argument]
""")
_AUTOCAST = Template("torch.autocast(torch.device(device).type, dtype=$dtype, enabled=not wide), ")
_CHOICES = Template("""\
        if name in (choices := $choices):  # indices: what counts is the value they pick
            source, dim = stored["input.0"], choices[name]
            if dim is None or not source.ndim:
                wide, result = (source.flatten()[index.flatten()] for index in (wide, result))
            else:
                full = (index if index.ndim == source.ndim else index.unsqueeze(dim) for index in (wide, result))
                wide, result = (torch.take_along_dim(source, index, dim) for index in full)
""")
_VECTORS = Template("""\
        if name in (vectors := $vectors):  # vectors are right with any sign or phase
            lean = (wide.conj() * result.to(wide.dtype)).sum(vectors[name], keepdim=True)
            result = (result.to(wide.dtype) / torch.where(lean.abs() > 0, lean / lean.abs(), 1.0)).to(result.dtype)
""")
