"""Births in backward under a GradScaler: they are none if the scaler skips the step because of them.

A scaler finds its scale by trying: from time to time gradients overflow, the step is skipped and the scale halved. So a backward
birth waits until the scaler has looked at the gradients.
"""

from __future__ import annotations

import gc
import weakref
from typing import Any

from tensorprobe import torch_names
from tensorprobe.torch_names import quiet
from tensorprobe.watches.overflow.ledger import Finding, Ledger
from tensorprobe.watches.overflow.rules import Seen
from tensorprobe.watches.overflow.tensors import key_of

UNSCALE = "Torch._amp_foreach_non_finite_check_and_unscale_"
"""What a scaler calls before each step; its second argument becomes 1 when a gradient is not finite."""


class ScalerWait:
    """Findings that wait for the scaler."""

    def __init__(self, ledger: Ledger, *, counts: bool) -> None:
        self._ledger = ledger
        self._counts = counts
        self._scaler: weakref.ref[Any] | None = None
        self._held: list[Finding] = []
        self.skipped: list[str] = []

    def holds(self, new: list[Finding], seen: Seen) -> bool:
        """Whether these findings have to wait: those in backward, and that of the loss times the scale. They are kept then."""
        if not new or self._counts or not self._is_used():
            return False
        scale = None if self._scaler is None else getattr(self._scaler(), "_scale", None)
        scaled = scale is not None and any(facts.key == key_of(scale) for facts in seen.inputs)
        if not scaled and not seen.name.endswith("backward"):
            return False
        self._held += new
        return True

    def skips(self, args: Any) -> bool:
        """The scaler has looked at the gradients: whether it skips the step. Then nothing was wrong."""
        if not self._held or len(args) < 2:
            return False
        with quiet():
            if not float(args[1]) > 0:
                return False
        for finding in self._held:
            self.skipped.append(finding.fact.call)
            self._ledger.take_back(finding, [key_of(gradient) for gradient in args[0]])
        self._held.clear()
        return True

    def release(self) -> list[Finding]:
        """The step was taken: what waited is a finding like any other."""
        held, self._held = self._held, []
        return held

    def _is_used(self) -> bool:
        """Whether a GradScaler has scaled a loss. Nobody tells us of it: it is looked for among all objects."""
        found = None if self._scaler is None else self._scaler()
        if found is None:
            # By type: asking an object for its class runs code of the object, and may warn.
            scalers = (each for each in gc.get_objects() if issubclass(type(each), torch_names.GradScaler))
            found = next((each for each in scalers if each.is_enabled() and each._scale is not None), None)
            self._scaler = None if found is None else weakref.ref(found)
        return found is not None
