"""Ops that draw random numbers: devices draw different ones, so their distributions are compared.

- Dropout: the share of zeros, the scale of the other elements, and whether the gradient is zero at the same places.
- Uniform, normal, exponential and Bernoulli numbers: their law, by the Kolmogorov-Smirnov test or by counts.
- Other numbers that are drawn one by one: the two-sample form of that test, device against CPU.
- One draw that decides over many elements: means and sizes of several runs, device against CPU.

All at odds of a million to one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal

import msgspec
import torch

from tensorprobe.model import Call
from tensorprobe.model.measured import Opinion
from tensorprobe.ops import Trait, has, short_name

Tensors = Mapping[str, torch.Tensor]

_ALPHA = 1e-6
_SIGMAS = 6.0
FEW = 64
"""The minimum elements for a distribution."""
ENOUGH = 1024
"""A call with fewer elements is repeated until it has this many, or up to the maximum."""
OFTEN = 64
_RUNS = 16
_SURE = 8.0
"""Means of runs differ if they are this many standard errors apart."""
_DROPOUTS = ("dropout", "dropout_", "native_dropout")
_DROPS = (*_DROPOUTS, "dropout1d", "dropout2d", "dropout3d", "feature_dropout", "feature_dropout_")
LAWFUL = frozenset(
    (*_DROPOUTS, "bernoulli", "bernoulli_", "rand", "rand_like", "uniform_", "randn", "randn_like", "normal", "normal_",
     "exponential_")
)  # fmt: skip
"""Ops whose law `judge_by_law` knows."""
_ATTENTION = {"scaled_dot_product_attention": (4, 99), "multi_head_attention_forward": (10, 13)}
"""Positions of dropout_p and training among the arguments."""
_RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu")


def draws_random(call: Call) -> bool:
    """Return whether the result of a call is random."""
    name = short_name(call.op)
    arguments = call.kwargs or {}
    if name in _ATTENTION:
        dropout, training = _ATTENTION[name]
        return (
            bool(argument_of(call, dropout, "dropout_p", 0.0)) and argument_of(call, training, "training", True) is True
        )
    if name in _RECURRENT:  # (…, num_layers, dropout, train, bidirectional, …): the first number that is no integer
        given = next((tree for tree in call.args or [] if isinstance(tree, float)), arguments.get("dropout"))
        return bool(given) and True in [tree for tree in call.args or [] if isinstance(tree, bool)][1:2]
    if not has(call.op, Trait.RANDOM):
        return False
    if "dropout" in name:
        return bool(argument_of(call, 1, "p", 0.5)) and _training(call)
    return name not in ("rrelu", "rrelu_") or bool(argument_of(call, 3, "training", False))


def without_dropout(call: Call) -> Call | None:
    """Return the call with a dropout of 0, for ops that also compute something else; None for others."""
    name, args, kwargs = short_name(call.op), list(call.args or []), dict(call.kwargs or {})
    if name in _ATTENTION:
        place, key = _ATTENTION[name][0], "dropout_p"
    elif name in _RECURRENT:
        place = next((at for at, tree in enumerate(args) if isinstance(tree, float)), len(args))
        key = "dropout"
    else:
        return None
    if place < len(args):
        args[place] = 0.0
    else:
        kwargs[key] = 0.0
    return msgspec.structs.replace(call, args=args, kwargs=kwargs)


def runs_needed(call: Call, elements: int) -> int:
    """Return how often a call must run for a distribution."""
    if not has(call.op, Trait.RANDOM_EACH):
        return _RUNS
    return min(OFTEN, -(-ENOUGH // elements)) if elements else 1


def sampling(call: Call, elements: int) -> tuple[Literal["samples", "runs", "dropout"], int, float]:
    """Return how a script compares random results: by numbers, by runs, or as dropout; in how many runs; p."""
    runs = max(4, runs_needed(call, elements))
    if not has(call.op, Trait.RANDOM_EACH):
        return "runs", runs, 0.0
    if is_dropout(call):
        return "dropout", runs, float(argument_of(call, 1, "p", 0.5))
    return "samples", runs, 0.0


def judge_sample(call: Call, inputs: Tensors, device: torch.Tensor, cpu: torch.Tensor) -> Opinion:
    """Return the distance of the device's sample from its distribution or, if that is unknown, from the CPU's sample.

    Both may hold several runs of the call, one after the other along a first dimension of their own.
    """
    name = short_name(call.op)
    if name == "randperm":
        wrong = int((device.sort().values != cpu.sort().values).sum())
        return Opinion("no permutation", float(wrong), 0.0)
    if not has(call.op, Trait.RANDOM_EACH):
        return _by_runs(device, cpu)
    if device.numel() < FEW:
        return Opinion("too few elements to tell", 0.0, 0.0)
    return judge_by_law(call, inputs, device) or _two_samples(device, cpu)


def judge_by_law(call: Call, inputs: Tensors, device: torch.Tensor) -> Opinion | None:
    """Return the distance of a sample from the law of its op; None if the op has no law here.

    A first dimension of its own counts the runs.
    """
    name = short_name(call.op)
    source = inputs.get("input.0")
    if not device.is_floating_point() and name not in ("randint", "random_", "bernoulli"):
        return None
    if name in _DROPOUTS and source is not None and device.shape[1:] == source.shape and device.is_floating_point():
        return _dropout(source, device, float(argument_of(call, 1, "p", 0.5)))
    if name in ("bernoulli", "bernoulli_"):
        chance = _number_or_tensor(call, inputs, 1, "p", None)
        chance = source if chance is None and name == "bernoulli" else 0.5 if chance is None else chance
        return _bernoulli(device, torch.as_tensor(chance, dtype=torch.float64))
    law = _law(call, name, inputs)
    return None if law is None else _one_sample(device, law)


def judge_dropped_gradient(
    source: torch.Tensor, output: torch.Tensor, given: torch.Tensor, gradient: torch.Tensor
) -> Opinion:
    """Return whether the gradient was dropped and scaled where the output was."""
    limits = torch.finfo(output.dtype)
    seen = source.abs() > limits.tiny  # subnormal numbers have a larger relative rounding error
    factor = torch.where(seen, output.double() / source.double(), torch.zeros_like(source, dtype=torch.float64))
    expected = factor * given.double()
    peak = expected.abs().max().clamp_min(1e-300)
    error = ((gradient.double() - expected).abs() * seen).max() / peak
    allowed = 4 * limits.eps + limits.smallest_normal * limits.eps / float(peak)
    return Opinion("gradient where values were dropped", float(error), allowed)


def is_recurrent(op: str) -> bool:
    """Return whether the op is a complete recurrent layer."""
    return short_name(op) in _RECURRENT


def drops(call: Call) -> bool:
    """Return whether the call drops elements or whole features of its first input, and scales the rest."""
    return short_name(call.op) in _DROPS


def is_dropout(call: Call) -> bool:
    """Return whether the call drops single elements of its first input."""
    return short_name(call.op) in _DROPOUTS


def _training(call: Call) -> bool:
    given = argument_of(call, 2, "training", (call.kwargs or {}).get("train", True))
    return given is not False


def argument_of(call: Call, position: int, keyword: str, otherwise: Any) -> Any:
    """Return an argument, however it was given."""
    trees = call.args or []
    return trees[position] if position < len(trees) else (call.kwargs or {}).get(keyword, otherwise)


def _number_or_tensor(call: Call, inputs: Tensors, position: int, keyword: str, otherwise: Any) -> Any:
    found = argument_of(call, position, keyword, otherwise)
    if isinstance(found, dict) and "slot" in found:
        return inputs[found["slot"]].double()
    return found if isinstance(found, (int, float)) or found is None else otherwise


def _law(call: Call, name: str, inputs: Tensors) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """Return the cumulative distribution function of an op, if it is known."""
    if name in ("rand", "rand_like"):
        return lambda x: x.clamp(0, 1)
    if name == "uniform_":
        low, high = (float(argument_of(call, at, key, end)) for at, key, end in ((1, "from", 0.0), (2, "to", 1.0)))
        return None if low == high else lambda x: ((x - low) / (high - low)).clamp(0, 1)
    if name in ("randn", "randn_like"):
        return _normal
    if name in ("normal_", "normal"):
        first = 0 if name == "normal" else 1
        mean = _number_or_tensor(call, inputs, first, "mean", 0.0)
        deviation = _number_or_tensor(call, inputs, first + 1, "std", 1.0)
        return None if bool(torch.as_tensor(deviation == 0).any()) else lambda x: _normal((x - mean) / deviation)
    if name == "exponential_":
        rate = float(argument_of(call, 1, "lambd", 1.0))
        return lambda x: 1 - torch.exp(-rate * x.clamp_min(0))
    return None


def _normal(x: torch.Tensor) -> torch.Tensor:
    return torch.special.ndtr(x)


def _dropout(source: torch.Tensor, device: torch.Tensor, p: float) -> Opinion:
    """Return the worse of two: the share of zeros against p, in standard errors; the rest against the scaled input."""
    inputs, drawn = source.double().expand(device.shape), device.double()
    there = inputs != 0
    counted = max(int(there.sum()), 1)
    share = float(((drawn == 0) & there).sum()) / counted
    error = abs(share - p) / math.sqrt(max(p * (1 - p), 1 / counted) / counted)
    kept = (drawn != 0) & there
    if kept.any() and p < 1:
        scale = 1 / (1 - p)
        astray = (drawn[kept] - scale * inputs[kept]).abs() / inputs[kept].abs()
        allowed = 4 * torch.finfo(device.dtype).eps * scale
        # Subnormal numbers have a larger relative rounding error.
        normal = inputs[kept].abs() > torch.finfo(device.dtype).tiny
        worst = float(astray[normal].max()) if normal.any() else 0.0
        if worst > allowed:
            return Opinion("scale of the kept values", worst, allowed)
    return Opinion("share of zeros, in standard errors", error, _SIGMAS)


def _bernoulli(device: torch.Tensor, chance: torch.Tensor) -> Opinion:
    drawn = device.double()
    if bool(((drawn != 0) & (drawn != 1)).any()):
        return Opinion("neither 0 nor 1", float(((drawn != 0) & (drawn != 1)).sum()), 0.0)
    chances = chance.expand(drawn.shape)
    variance = float((chances * (1 - chances)).sum())
    error = abs(float((drawn - chances).sum())) / math.sqrt(max(variance, 1.0))
    return Opinion("number of ones, in standard errors", error, _SIGMAS)


def _one_sample(device: torch.Tensor, law: Callable[[torch.Tensor], torch.Tensor]) -> Opinion:
    chances = law(device.double()).flatten().sort().values
    count = len(chances)
    steps = torch.arange(count + 1, dtype=torch.float64) / count
    distance = float(torch.maximum((steps[1:] - chances).abs(), (chances - steps[:-1]).abs()).max())
    grain = torch.finfo(device.dtype).eps if device.is_floating_point() else 0.0
    return Opinion("distance from the distribution", distance, _critical() / math.sqrt(count) + grain)


def _two_samples(device: torch.Tensor, cpu: torch.Tensor) -> Opinion:
    one, other = (
        torch.view_as_real(sample).flatten() if sample.is_complex() else sample.flatten() for sample in (device, cpu)
    )
    one, other = (sample.double().sort().values for sample in (one, other))
    every = torch.cat((one, other)).sort().values
    shares = [torch.searchsorted(sample, every, right=True) / len(sample) for sample in (one, other)]
    distance = float((shares[0] - shares[1]).abs().max())
    allowed = _critical() * math.sqrt((len(one) + len(other)) / (len(one) * len(other)))
    return Opinion("distance of the distributions", distance, allowed)


def _by_runs(device: torch.Tensor, cpu: torch.Tensor) -> Opinion:
    """Compare mean and size of each run, device against CPU, in standard errors."""
    worst = 0.0
    wide = [(torch.view_as_real(runs) if runs.is_complex() else runs).double() for runs in (device, cpu)]
    for figure in (torch.mean, lambda run: run.square().mean().sqrt()):
        one, other = (torch.stack([figure(run) for run in runs]) for runs in wide)
        rounding = 1e-6 * float(other.abs().max())
        error = math.sqrt(float(one.var() + other.var()) / len(one)) + rounding
        worst = max(worst, float((one.mean() - other.mean()).abs()) / error) if error else worst
    return Opinion("means of several runs, in standard errors", worst, _SURE)


def _critical() -> float:
    return math.sqrt(-math.log(_ALPHA / 2) / 2)
