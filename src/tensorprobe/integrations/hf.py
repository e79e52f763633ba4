"""A callback for the Trainer of Hugging Face: three training steps are three steps of the run."""

from __future__ import annotations

import os
from typing import Any

from transformers import TrainerCallback

from tensorprobe.taps import Probe


class TensorprobeCallback(TrainerCallback):
    """Records a training: `Trainer(..., callbacks=[TensorprobeCallback("runs/a", steps="0-2")])`.

    `settings` are those of `tensorprobe.capture`. A step ends where the Trainer ends it, after the optimizer; micro-batches of
    gradient accumulation, and evaluation, belong to the step they are made in (`microbatch` and `phase` of a call).
    """

    def __init__(self, out: str | os.PathLike[str], **settings: Any) -> None:
        self._out, self._settings = out, settings
        self.probe: Probe | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **given: Any) -> None:
        """Start to record."""
        self.probe = Probe(self._out, model=model, **self._settings).start()

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """End a step."""
        if self.probe is not None:
            self.probe.step()

    def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Stop, and write the rest."""
        if self.probe is not None:
            self.probe.stop()
