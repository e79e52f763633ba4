"""Names of calls as a user of the older tool writes them: `Tensor_permute_1_forward`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tensorprobe import torch_names
from tensorprobe.errors import SettingsError, did_you_mean
from tensorprobe.legacy.ptdbg import logger
from tensorprobe.model.call_name import FAMILIES, CallName, parse_call_name, underscored
from tensorprobe.ops.names import canonical_call_name, canonical_op

_HOMES = {
    "Tensor": torch.Tensor,
    "Torch": torch,
    "Functional": torch.nn.functional,
    "VF": torch_names.recurrent_functions,
}

_BOUND_TO_METHODS = frozenset(
    "__add__ __radd__ __sub__ __mul__ __rmul__ __truediv__ __div__ __mod__ __matmul__ __imatmul__ __neg__ __pos__ __abs__ "
    "__ne__ __lt__ __le__ __gt__ __ge__ __iadd__ __isub__ __imul__ __itruediv__ __idiv__ __ifloordiv__ __imod__ "
    "__rand__ __ror__ __rxor__".split()
)
"""Operators for which torch runs a method, and shows no other name. All others (`__pow__`, `__eq__`) have their own."""


def read_names(scope: Any, argument: str) -> tuple[str, ...]:
    """The names as capture gives them; SettingsError for what cannot be the name of a call."""
    if isinstance(scope, str) or not all(isinstance(name, str) for name in scope):
        raise SettingsError(
            f"{argument} takes a list of names of calls, such as ['Tensor_permute_1_forward']; got {scope!r}."
        )
    return tuple(_read(name, argument) for name in scope)


def _read(name: str, argument: str) -> str:
    parts = parse_call_name(name)
    if not (parts.number and parts.direction) or canonical_call_name(name).partition(".")[0] not in FAMILIES:
        raise SettingsError(
            f"{argument} has {name!r}, which is not the name of a call.\n"
            "  Such names are {prefix}_{api}_{number}_{forward or backward}, as a dump has them: Tensor_permute_1_forward. "
            f"Prefixes: {', '.join(FAMILIES)}."
        )
    recorded = str(CallName(_recorded(parts.op), parts.number, parts.direction))
    if _recorded(parts.op) != parts.op:
        logger.warning(
            "%s: %s is recorded as %s, which has one count for all its spellings: the call meant is %s.",
            argument,
            name,
            _recorded(parts.op).replace(".", "_", 1),
            underscored(recorded),
        )
    return recorded


def read_apis(api_list: Sequence[str]) -> tuple[str, ...]:
    """Names of APIs as they are recorded: `Tensor_add` and `__add__` are `Tensor.add`."""
    return tuple(map(_read_api, api_list))


def _read_api(api: str) -> str:
    family, _, rest = api.partition("_")
    if family in FAMILIES and rest:
        return _recorded(f"{family}.{rest}")
    return _recorded(f"Tensor.{api}") if api in _BOUND_TO_METHODS else api


def _recorded(op: str) -> str:
    """The name under which capture records the op: of names that mean the same, the one that torch shows it."""
    canonical = canonical_op(op)
    family, _, api = canonical.partition(".")
    given, _, own = op.partition(".")
    if own == api or given not in _HOMES or own in _BOUND_TO_METHODS or family != given:
        return canonical
    return op


def warn_of_unknown(names: tuple[str, ...]) -> None:
    """Say at once which APIs torch does not have: the dump would be empty."""
    for name in names:
        family, _, api = parse_call_name(name).op.partition(".")
        home = _HOMES.get(family)
        if home is not None and not hasattr(home, api):
            logger.warning(
                "scope: %s: torch has no %s.%s.%s", underscored(name), family, api, did_you_mean(api, dir(home))
            )
