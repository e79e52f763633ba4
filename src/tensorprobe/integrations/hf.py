"""A callback for the Trainer of Hugging Face: three training steps are three steps of the run."""

from __future__ import annotations

import os
from typing import Any

from transformers import TrainerCallback

from tensorprobe.taps import Probe


class TensorprobeCallback(TrainerCallback):
    """Records a training: `Trainer(..., callbacks=[TensorprobeCallback("runs/a", steps="0-2")])`.

    `settings` are those of `tensorprobe.capture`. A step begins where the Trainer begins it. Micro-batches of gradient
    accumulation belong to their step, and an evaluation to the step before it (`microbatch` and `phase` of a call).
    """

    def __init__(self, out: str | os.PathLike[str], **settings: Any) -> None:
        self._out, self._settings = out, settings
        self._begun = False
        self.probe: Probe | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **given: Any) -> None:
        """Start to record."""
        self.on_train_end(args, state, control)  # the training before may have raised
        self._begun = False
        self.probe = Probe(self._out, model=model, **self._settings).start()

    def on_step_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Begin the next step."""
        if self.probe is not None and self._begun:
            self.probe.step()
        self._begun = True

    def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Stop, and write the rest."""
        if self.probe is not None:
            self.probe.stop()
