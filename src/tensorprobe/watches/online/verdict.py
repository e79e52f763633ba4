"""The verdict on one call: its results against those of the reference.

One pass against a wide reference settles most results: they are clearly right (`is_right`, with the limits that the noise-aware
standard has if the CPU makes no error at all). For the others, the call also runs on the CPU in its own dtype. Before it is called
wrong, it runs a few more times with inputs that differ in their last bit.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch

from tensorprobe.arguments import flatten_arguments
from tensorprobe.judge.limits import judge_figures
from tensorprobe.judge.standards import judge
from tensorprobe.model import Call
from tensorprobe.model.measured import Opinion
from tensorprobe.model.reason import NotCompared
from tensorprobe.replay.evidence import (
    TIMES,
    Figures,
    gather,
    measure,
    nudged,
    on_host,
    shared_mask,
    spread,
    weigh,
    within_range,
)
from tensorprobe.replay.indices import aligned, same_choice, vector_dimension
from tensorprobe.replay.randomness import FEW, draws_random, is_dropout, judge_by_law
from tensorprobe.replay.sight import glance, is_right
from tensorprobe.watches.online.lifting import Arguments, OpPlan, kept, lift, lower
from tensorprobe.watches.online.policies import Measure, Measures
from tensorprobe.watches.online.reference import NoReference, Outputs, run

SAME: Figures = {"relative_l2": 0.0, "one_minus_cosine": 0.0, "max_abs": 0.0, "different": 0.0}
_OF_BITS = ("bit_identical", "ulp_")
_FALLBACK = {
    "double": ("double", "single", "own"),
    "single": ("single", "double", "own"),
    "rounded": ("rounded", "own"),
    "own": ("own", "rounded"),
}


class Case(NamedTuple):
    """A call and its results on the device. `templates` are its arguments, or what remains of them."""

    func: Any
    plan: OpPlan
    call: str
    module: str
    templates: Arguments
    lifted: Arguments
    precision: str
    results: Outputs
    alone: bool
    """Whether the CPU itself is under test."""
    device: str = "cpu"


class Judged(NamedTuple):
    """The verdict on one slot. `wide` is the reference; None if only one side has the slot."""

    slot: str
    opinion: Opinion
    figures: Figures
    wide: torch.Tensor | None
    result: torch.Tensor
    message: str = ""


def decide(case: Case, measures: Measures) -> list[Judged]:
    """Return a row for each output. Raises NoReference if there is nothing to compare with."""
    if case.plan.draws and draws_random(call := call_of(case)[0]):
        return _by_law(case, call)
    reference, precision = _reference(case)
    rows: list[Judged] = []
    doubtful: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    alone = case.alone or precision == "own"
    sizes = [tensor.numel() for _, tensor in case.lifted.tensors()] if alone else []
    for slot in dict.fromkeys([*case.results, *reference]):
        wide, result = reference.get(slot), case.results.get(slot)
        if wide is None or result is None or wide.shape != result.shape:
            rows.append(_unlike(slot, wide, result))
            continue
        wide, result = on_host(wide), on_host(result)
        asked = measures.of(case.call, case.plan.name, slot, result.dtype, case.module)
        if asked.standard is None:
            figures = _figures(wide, result)
            rows.append(Judged(slot, judge_figures(asked.rule, figures), figures, wide, result))
            continue
        right = None
        if asked.standard.doubts and (asked.rule.noise or 1.0) >= 1.0:
            right = _at_sight(case, wide, result, alone, sizes)
        if right is None:
            doubtful[slot] = (wide, result)
        else:
            rows.append(
                Judged(slot, Opinion("relative_l2", right, right), {**SAME, "relative_l2": right}, wide, result)
            )
    if doubtful:
        rows += _weigh(case, reference, precision, doubtful, measures)
    return rows


LUCK = 1.5
"""How much further than in a precheck random numbers may be from their law: a training draws them many times."""


def call_of(case: Case, op: str = "") -> tuple[Call, dict[str, torch.Tensor]]:
    """Return the call as a run would record it, by the name of `op` if there is one, and its inputs in its own dtypes."""
    own, inputs = lower(case.templates, case.lifted), list[tuple[str, torch.Tensor]]()
    args, kwargs = flatten_arguments(tuple(own.args), own.kwargs, inputs)
    return Call(name=f"{op or case.plan.name}.0.forward", args=args, kwargs=kwargs), dict(inputs)


def _by_law(case: Case, call: Call) -> list[Judged]:
    """Judge random numbers by their distribution, and the mask of a dropout by its zeros."""
    inputs, drawn = call_of(case)[1], on_host(case.results["output.0"])
    opinion = judge_by_law(call, inputs, drawn[None]) if drawn.numel() >= FEW else None
    if opinion is None:
        raise NoReference(f"random, of fewer than {FEW} numbers" if drawn.numel() < FEW else NotCompared.RANDOM)
    found = [Judged("output.0", opinion._replace(allowed=LUCK * opinion.allowed), SAME, None, drawn)]
    if is_dropout(call) and "output.1" in case.results:
        mask = on_host(case.results["output.1"])
        wrong = int(((mask != 0) != (drawn != 0))[inputs["input.0"] != 0].sum())
        found.append(Judged("output.1", Opinion("mask beside the zeros", float(wrong), 0.0), SAME, None, mask))
    return found


def _at_sight(case: Case, wide: torch.Tensor, result: torch.Tensor, alone: bool, sizes: list[int]) -> float | None:
    """Return the relative error of a result that is clearly right, else None."""
    seen = glance(wide, result)
    if seen is None or not is_right(case.plan.name, seen, wide, result, alone=alone, sizes=sizes):
        return None
    return seen.relative_error


def _figures(wide: torch.Tensor, result: torch.Tensor) -> Figures:
    """Return the figures of a pair. Bitwise figures compare with the reference rounded to the dtype of the result."""
    if wide.dtype is result.dtype:
        return measure([(wide, result)])[0]
    figures, rounded = measure([(wide, result), (wide.to(result.dtype), result)])
    return {name: rounded[name] if name.startswith(_OF_BITS) else value for name, value in figures.items()}


def _reference(case: Case) -> tuple[Outputs, str]:
    """Return the reference's results, in the requested precision or the next one with a CPU kernel."""
    reason: NoReference | None = None
    for precision in _FALLBACK[case.precision]:
        given = case.lifted if precision == case.precision else _at(case, precision)
        if precision != case.precision and case.alone and not _is_wider(case, given):
            continue  # the CPU would be compared with itself
        try:
            outputs = run(case.func, case.plan, kept(case.plan, given))
        except NoReference as error:
            reason = reason or error
            continue
        if precision == "rounded":
            outputs = {slot: _like(tensor, case.results.get(slot)) for slot, tensor in outputs.items()}
        return outputs, precision
    raise NoReference(f"the CPU has no kernel in a wider dtype ({reason})") if case.alone else reason or NoReference


def _is_wider(case: Case, given: Arguments) -> bool:
    own = lower(case.templates, case.lifted)
    return any(one.dtype != other.dtype for (_, one), (_, other) in zip(own.tensors(), given.tensors(), strict=True))


def _like(wide: torch.Tensor, result: torch.Tensor | None) -> torch.Tensor:
    return wide if result is None else wide.to(result.dtype)


def _at(case: Case, precision: str) -> Arguments:
    """Return the inputs in another precision."""
    own = lower(case.templates, case.lifted)
    return lift(case.plan, own, precision, copies=bool(case.plan.written))


def _weigh(
    case: Case,
    reference: Outputs,
    precision: str,
    doubtful: dict[str, tuple[torch.Tensor, torch.Tensor]],
    measures: Measures,
) -> list[Judged]:
    """Judge slots that are not clearly right by the standard, with all the evidence."""
    if precision == "own" and not case.alone:  # a same-dtype reference may be as wrong as the device
        wider = _wider(case)
        if wider is not None:
            reference, precision = wider
    if case.alone:
        own = case.results
    else:
        own = reference if precision == "own" else _attempt(case, "own")
    op = case.plan.name
    hosts, mine = {}, {}
    for slot, (_, result) in doubtful.items():
        wide, dim = on_host(reference[slot]), vector_dimension(_vector_op(case.plan.base), slot)
        hosts[slot] = (
            within_range(wide, result.dtype),
            result if dim is None else aligned(wide, result, dim),
        )
        if not case.alone and slot in own and own[slot].shape == wide.shape and precision != "own":
            mine[slot] = on_host(own[slot]) if dim is None else aligned(wide, on_host(own[slot]), dim)
    seen = dict(hosts)
    for slot, (wide, result) in hosts.items():
        if (mask := shared_mask(wide, result)) is not None:
            seen[slot] = wide.masked_fill(mask, 0), result.masked_fill(mask, 0)
            if slot in mine:
                mine[slot] = mine[slot].masked_fill(mask, 0)
    inputs = [tensor for _, tensor in lower(case.templates, case.lifted).tensors()]
    evidence = gather(op, "forward", seen, mine, inputs=inputs)
    asked = {slot: measures.of(case.call, op, slot, result.dtype, case.module) for slot, (_, result) in hosts.items()}
    opinions = weigh(
        evidence,
        {slot: wide for slot, (wide, _) in seen.items()},
        lambda slot, each: _judge(asked[slot], each),
        doubts=lambda slot: asked[slot].standard is not None and asked[slot].standard.doubts,  # type: ignore[union-attr]
        spread=partial(_spread, case, reference, precision, own),
    )
    return [
        Judged(slot, _pardoned(case, slot, opinion, *hosts[slot]), evidence[slot].device, *hosts[slot])
        for slot, opinion in opinions.items()
    ]


def _judge(asked: Measure, evidence: Any) -> Opinion:
    if asked.standard is None:
        return judge_figures(asked.rule, evidence.device)
    opinion = judge(asked.standard, evidence)
    return opinion._replace(allowed=opinion.allowed * (asked.rule.noise or 1.0))


def _wider(case: Case) -> tuple[Outputs, str] | None:
    for precision in ("double", "single"):
        found = _attempt(case, precision)
        if found:
            return found, precision
    return None


def _attempt(case: Case, precision: str) -> Outputs:
    """Return the results of the CPU in a precision; empty if it cannot run the call."""
    try:
        return run(case.func, case.plan, _at(case, precision))
    except NoReference:
        return {}


def _spread(case: Case, reference: Outputs, precision: str, own: Outputs, wide: Outputs) -> dict[str, Figures]:
    """Measure how far the results move with the last bits of the inputs."""
    base = lower(case.templates, case.lifted)
    tensors = dict(base.tensors())
    moves = []
    for number in range(TIMES):
        inputs = base.replaced(iter(nudged(tensors, f"{case.call}:{number}", sparse=not case.alone).values()))
        for kind, before in {"own": own, precision: reference}.items():
            try:
                after = run(case.func, case.plan, lift(case.plan, inputs, kind, copies=True))
            except NoReference:
                continue
            moves.append((before, after))
    return spread(moves, wide)


def _pardoned(case: Case, slot: str, opinion: Opinion, wide: torch.Tensor, result: torch.Tensor) -> Opinion:
    """Pass a failing slot if values tie and another choice is as good, or if the CPU is not deterministic either."""
    if opinion.passes:
        return opinion
    base = lower(case.templates, case.lifted)
    if result.dtype is torch.bool and _same_answer(case, base, slot, result):
        return Opinion("a Python number rounded to the dtype of the tensor", 0.0, 0.0)
    if result.dtype is torch.int64 and _same_choice(case, base, wide, result):
        return Opinion("different choices of equal values", 0.0, 0.0)
    first, second = _attempt(case, "own"), _attempt(case, "own")
    if slot in first and slot in second and not is_bitwise_equal(on_host(first[slot]), on_host(second[slot])):
        return Opinion("not deterministic on the CPU either", 0.0, 0.0)
    return opinion


def _same_answer(case: Case, base: Arguments, slot: str, result: torch.Tensor) -> bool:
    """Return whether the reference agrees if it rounds Python numbers first, as `x == 0.1` does in float32."""
    dtype = next((tensor.dtype for _, tensor in base.tensors() if tensor.is_floating_point()), torch.float32)

    def rounded(value: Any) -> Any:
        return torch.tensor(value, dtype=dtype).item() if type(value) is float else value

    given = Arguments([rounded(value) for value in base.args], {at: rounded(v) for at, v in base.kwargs.items()})
    try:
        answers = run(case.func, case.plan, lift(case.plan, given, case.precision, copies=True))
    except NoReference:
        return False
    return slot in answers and bool(torch.equal(on_host(answers[slot]), result))


def is_bitwise_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors hold the same bytes."""
    return one.shape == other.shape and (
        not one.numel() or bool(torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8)))
    )


def _same_choice(case: Case, base: Arguments, wide: torch.Tensor, result: torch.Tensor) -> bool:
    named = list(base.tensors())
    if not named or not case.results:
        return False
    source = named[0][1]
    if "max_pool" in case.plan.base:
        dims = 3 if "3d" in case.plan.base else 2
        if source.ndim < dims or wide.shape[:-dims] != source.shape[:-dims]:
            return False
        flat = source.flatten(-dims)
        picked = [flat.gather(-1, each.flatten(-dims)) for each in (wide, result) if _inside(each, flat.shape[-1])]
        return len(picked) == 2 and bool(torch.equal(*picked))
    return same_choice(call_of(case, f"Torch.{case.plan.base}")[0], {"input.0": source}, wide, result)


def _inside(indices: torch.Tensor, size: int) -> bool:
    return bool(((indices >= 0) & (indices < size)).all())


def _unlike(slot: str, wide: torch.Tensor | None, result: torch.Tensor | None) -> Judged:
    there = result if result is not None else wide
    if wide is None or result is None:
        who = "the reference" if wide is None else "the device"
        return Judged(slot, Opinion("absent", 1.0, 0.0), SAME, None, on_host(there), f"{who} does not return it")
    text = f"has shape {list(result.shape)}, the reference has {list(wide.shape)}"
    return Judged(slot, Opinion("shape", 1.0, 0.0), SAME, None, on_host(result), text)


def _vector_op(base: str) -> str:
    """Return precheck's name of an op that returns vectors: `_linalg_eigh` → `Torch.linalg.eigh`."""
    return "Torch." + base.lstrip("_").replace("linalg_", "linalg.", 1)
