"""References for recurrent cells that accelerators do in one op and for which torch has neither a CPU kernel nor a decomposition.

Gates stand in torch's order: input, forget, candidate, output of an LSTM; reset, update, candidate of a GRU. What a cell
keeps for its backward (`kept`) is what the device's forward gave, so a backward is judged by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


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
