"""Which calls are compared, and how they are judged: sampling, and the rules of a policy."""

from __future__ import annotations

import os
from typing import Any, NamedTuple

import torch

from tensorprobe.errors import SettingsError, did_you_mean
from tensorprobe.judge.policy import POLICIES, Policy, Rule, check_policy, load_policy
from tensorprobe.judge.standards import STANDARDS, Standard
from tensorprobe.watches.online.lifting import OpPlan


class Sampler:
    """Decides which calls are compared."""

    def __init__(self, every: int = 1, once_per_kind: bool = False) -> None:
        self._every = every
        self._once_per_kind = once_per_kind
        self._calls: dict[str, int] = {}
        self._kinds: set[tuple[Any, ...]] = set()
        self.takes_all = every == 1 and not once_per_kind

    def wants(self, plan: OpPlan, args: Any, kwargs: Any) -> bool:
        """Return whether to compare this call. Call it once for each call. The first call of each op is always compared."""
        if self._once_per_kind:
            kind = (plan.name, *map(_kind, args), *((name, _kind(value)) for name, value in kwargs.items()))
            if kind in self._kinds:
                return False
            self._kinds.add(kind)
        if self._every == 1:
            return True
        number = self._calls.get(plan.name, 0)
        self._calls[plan.name] = number + 1
        return number % self._every == 0


def _kind(value: Any) -> Any:
    """Return what may make a kernel take another path: everything of an argument but the numbers in tensors."""
    if isinstance(value, torch.Tensor):
        layout = value.stride() if value.layout is torch.strided else value.layout
        return (value.dtype, value.shape, layout, value.device.type)
    if isinstance(value, (list, tuple)):
        return tuple(map(_kind, value))
    return value if isinstance(value, (int, bool, str, type(None))) else str(value)


NOISE_AWARE = "noise-aware"


class Measure(NamedTuple):
    """How one slot is judged. Without a standard, the rule alone decides from the figures against the reference."""

    standard: Standard | None
    rule: Rule


class Measures:
    """The measure of each slot, from a policy of compare, a standard of precheck, or a file with rules."""

    def __init__(self, policy: str | os.PathLike[str] | Policy) -> None:
        policy = policy if isinstance(policy, Policy) else str(policy)
        if isinstance(policy, Policy):
            check_policy(policy)
            self._policy, self._standard = policy, STANDARDS[NOISE_AWARE]
        elif policy in STANDARDS:
            self._policy, self._standard = POLICIES[NOISE_AWARE], STANDARDS[policy]
        elif policy in POLICIES or policy.endswith(".toml"):
            self._policy, self._standard = load_policy(policy), STANDARDS[NOISE_AWARE]
        else:
            known = [*dict.fromkeys([*STANDARDS, *POLICIES])]
            raise SettingsError(
                f"unknown policy {policy!r}.{did_you_mean(policy, known)}\n"
                f"  Choose {', '.join(known)}, or the path of a .toml file with rules."
            )
        self.name = policy if isinstance(policy, str) else policy.name
        first = self._policy.rules[:1]
        self._only = self._measure(first[0]) if first and first[0].fits_all else None

    def of(self, call: str, op: str, slot: str, dtype: torch.dtype, module: str) -> Measure:
        """Return the measure of a slot of a call."""
        if self._only is not None:
            return self._only
        about = (call, op, slot, str(dtype).removeprefix("torch."), module)
        return self._measure(next((rule for rule in self._policy.rules if rule.fits(*about)), Rule(ignore=True)))

    def _measure(self, rule: Rule) -> Measure:
        return Measure(None if rule.diverges or rule.ignore else self._standard, rule)
