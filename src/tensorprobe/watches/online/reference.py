"""Does an op again on the CPU: below autograd, without autocast, seen by nobody.

In: arguments as `lifting` makes them. Out: the tensors the op gives and those it has changed, by slot. Where the CPU has no
kernel for the op, torch's own decomposition of it serves; where it has none in the wider dtype, the caller is told.
"""

from __future__ import annotations

from typing import Any

import torch

from tensorprobe import torch_names
from tensorprobe.replay.runs import said
from tensorprobe.watches.online.cells import CELLS
from tensorprobe.watches.online.lifting import Arguments
from tensorprobe.watches.online.schema import OpPlan

Outputs = dict[str, torch.Tensor]


_NUMBERS = {bool: torch.bool, int: torch.int64, float: torch.float64, complex: torch.complex128}
NO_KERNEL = "no kernel on the CPU"


class NoReference(Exception):
    """The CPU cannot do this op with these arguments."""


def run(func: Any, plan: OpPlan, given: Arguments) -> Outputs:
    """What the CPU makes of it; NoReference with the reason when it refuses."""
    with torch_names.no_overrides(), torch_names.below_autograd(), torch_names.no_autocast():
        try:
            result = func(*given.args, **given.kwargs)
        except NotImplementedError as error:
            result = _decomposed(func, plan, given, error)
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            raise NoReference(said(error)) from None
    return outputs_of(plan, given, result)


def outputs_of(plan: OpPlan, given: Arguments, result: Any) -> Outputs:
    """The tensors of a result by slot, then the changed arguments that are not among them."""
    found: Outputs = {}
    if isinstance(result, torch.Tensor):
        found["output.0"] = result
    elif type(result) in _NUMBERS:
        found["output.0"] = torch.tensor(result, dtype=_NUMBERS[type(result)])
    elif isinstance(result, (list, tuple)):
        for at, each in enumerate(result):
            if isinstance(each, torch.Tensor):
                found[f"output.{at}"] = each
            elif isinstance(each, (list, tuple)):
                found |= {f"output.{at}.{i}": one for i, one in enumerate(each) if isinstance(one, torch.Tensor)}
    if plan.written:
        known = {id(tensor) for tensor in found.values()}
        for place in sorted(plan.written, key=str):
            for slot, tensor in Arguments([given[place]], {}).tensors():
                if id(tensor) not in known:
                    found[f"output.{place}{slot.removeprefix('input.0')}"] = tensor
    return found


def _decomposed(func: Any, plan: OpPlan, given: Arguments, error: NotImplementedError) -> Any:
    way = CELLS.get(plan.base) or torch_names.decompositions().get(func)
    if way is None:
        raise NoReference(NO_KERNEL) from error
    try:
        return way(*given.args, **given.kwargs)
    except Exception as problem:  # whatever a decomposition raises, it is no reference
        raise NoReference(f"{NO_KERNEL}, and its decomposition raised {said(problem)}") from None
