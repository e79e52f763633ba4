"""Runs an op again on the CPU. The caller works below autograd, without autocast, unseen by modes.

Takes arguments from `lifting` and returns the op's outputs and changed arguments by slot. If the CPU has no kernel for the op,
torch's decomposition is used, or one of the recurrent cells below, which accelerators compute in one op. If it has none in the
wider dtype, NoReference is raised.

The gates of a cell are in torch's order: input, forget, candidate, output (LSTM); reset, update, candidate (GRU). What a cell keeps
for its backward (`kept`) comes from the device's forward, so the backward is judged alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tensorprobe import torch_names
from tensorprobe.model.interrupts import let_through
from tensorprobe.model.silence import silent
from tensorprobe.replay.runs import said
from tensorprobe.watches.online.lifting import Arguments, OpPlan


def _sum_of_gates(one: Tensor, other: Tensor, *biases: Tensor | None) -> Tensor:
    total = one + other
    for bias in biases:
        total = total if bias is None else total + bias
    return total


def _slope_of_sigmoid(value: Tensor) -> Tensor:
    return value * (1 - value)


def _lstm(
    from_input: Tensor,
    from_hidden: Tensor,
    cell: Tensor,
    input_bias: Tensor | None = None,
    hidden_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    gates = _sum_of_gates(from_input, from_hidden, input_bias, hidden_bias)
    write, forget, candidate, show = gates.tensor_split(4, dim=1)
    kept = torch.cat([write.sigmoid(), forget.sigmoid(), candidate.tanh(), show.sigmoid()], dim=1)
    write, forget, candidate, show = kept.tensor_split(4, dim=1)
    after = torch.addcmul(write * candidate, forget, cell)
    return show * after.tanh(), after, kept


def _lstm_backward(
    of_hidden: Tensor | None, of_cell: Tensor | None, cell: Tensor, after: Tensor, kept: Tensor, has_bias: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    write, forget, candidate, show = kept.tensor_split(4, dim=1)
    shown = after.tanh()
    hidden = torch.zeros_like(after) if of_hidden is None else of_hidden
    inner = hidden * show * (1 - shown.square()) + (0 if of_cell is None else of_cell)
    of_gates = torch.cat(
        [
            inner * candidate * _slope_of_sigmoid(write),
            inner * cell * _slope_of_sigmoid(forget),
            inner * write * (1 - candidate.square()),
            hidden * shown * _slope_of_sigmoid(show),
        ],
        dim=1,
    )
    return of_gates, inner * forget, of_gates.sum(dim=0) if has_bias else None


def _gru(
    from_input: Tensor,
    from_hidden: Tensor,
    hidden: Tensor,
    input_bias: Tensor | None = None,
    hidden_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    one = from_input if input_bias is None else from_input + input_bias
    other = from_hidden if hidden_bias is None else from_hidden + hidden_bias
    reset, update, candidate = one.tensor_split(3, dim=1)
    reset_too, update_too, recalled = other.tensor_split(3, dim=1)
    reset, update = torch.sigmoid(reset + reset_too), torch.sigmoid(update + update_too)
    candidate = torch.tanh(torch.addcmul(candidate, reset, recalled))
    kept = torch.cat([reset, update, candidate, hidden, recalled], dim=1)
    return (1 - update) * candidate + update * hidden, kept


def _gru_backward(of_hidden: Tensor, kept: Tensor, has_bias: bool) -> tuple[Tensor | None, ...]:
    reset, update, candidate, hidden, recalled = kept.tensor_split(5, dim=1)
    of_update = of_hidden * (hidden - candidate) * _slope_of_sigmoid(update)
    of_candidate = of_hidden * (1 - update) * (1 - candidate.square())
    of_reset = of_candidate * recalled * _slope_of_sigmoid(reset)
    of_input = torch.cat([of_reset, of_update, of_candidate], dim=1)
    of_recalled = torch.cat([of_reset, of_update, of_candidate * reset], dim=1)
    biases = (of_input.sum(dim=0), of_recalled.sum(dim=0)) if has_bias else (None, None)
    return of_input, of_recalled, of_hidden * update, *biases


CELLS: dict[str, Callable[..., Any]] = {
    "_thnn_fused_lstm_cell": _lstm,
    "_thnn_fused_lstm_cell_backward_impl": _lstm_backward,
    "_thnn_fused_gru_cell": _gru,
    "_thnn_fused_gru_cell_backward": _gru_backward,
}


Outputs = dict[str, torch.Tensor]


_NUMBERS = {bool: torch.bool, int: torch.int64, float: torch.float64, complex: torch.complex128}
NO_KERNEL = "no kernel on the CPU"


class NoReference(Exception):
    """The CPU cannot run this op with these arguments."""


def run(func: Any, plan: OpPlan, given: Arguments) -> Outputs:
    """Return the outputs of the op on the CPU. Raises NoReference with the reason if it fails.

    What its kernel warns of, the program was told when it called the op: a call in C passes warnings on at its own end, and not
    at the end of the call of the program that ours is inside of.
    """
    with silent():
        try:
            result = torch_names.no_override(func, (), tuple(given.args), given.kwargs)
        except NotImplementedError as error:
            let_through(error)
            result = _decomposed(func, plan, given, error)
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            let_through(error)
            raise NoReference(said(error)) from None
    return outputs_of(plan, given, result)


def outputs_of(plan: OpPlan, given: Arguments, result: Any) -> Outputs:
    """Return the tensors of a result by slot, and the changed arguments that are not among them."""
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
    except Exception as problem:  # a decomposition may raise anything
        let_through(problem)
        raise NoReference(f"{NO_KERNEL}, and its decomposition raised {said(problem)}") from None
