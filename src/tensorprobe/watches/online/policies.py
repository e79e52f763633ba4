"""By what a result is judged online: a standard of precheck, or the rules of a policy of compare."""

from __future__ import annotations

import os
from typing import NamedTuple

import torch

from tensorprobe.errors import SettingsError, did_you_mean
from tensorprobe.judge.policy import POLICIES, Policy, Rule, check_policy, load_policy
from tensorprobe.judge.standards import STANDARDS, Standard

NOISE_AWARE = "noise-aware"


class Measure(NamedTuple):
    """What is asked of one slot. Without a standard the rule alone decides, from the figures against the reference."""

    standard: Standard | None
    rule: Rule


class Measures:
    """The measure for each slot, by a policy of compare, a standard of precheck, or a file with rules."""

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
                f"no policy is called {policy!r}.{did_you_mean(policy, known)}\n"
                f"  There are {', '.join(known)}, or the path of a .toml file with rules."
            )
        self.name = policy if isinstance(policy, str) else policy.name
        first = self._policy.rules[:1]
        self._only = self._measure(first[0]) if first and first[0].fits_all else None

    def of(self, call: str, op: str, slot: str, dtype: torch.dtype, module: str) -> Measure:
        """The measure for a slot of a call."""
        if self._only is not None:
            return self._only
        about = (call, op, slot, str(dtype).removeprefix("torch."), module)
        return self._measure(next((rule for rule in self._policy.rules if rule.fits(*about)), Rule(ignore=True)))

    def _measure(self, rule: Rule) -> Measure:
        return Measure(None if rule.diverges or rule.ignore else self._standard, rule)
