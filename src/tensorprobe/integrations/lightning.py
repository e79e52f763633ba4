"""A callback for the Trainer of Lightning: three training steps are three steps of the run."""

from __future__ import annotations

import os
from typing import Any

from lightning.pytorch.callbacks import Callback

from tensorprobe.taps import Probe


class TensorprobeCallback(Callback):
    """Records a training: `Trainer(..., callbacks=[TensorprobeCallback("runs/a", steps="0-2")])`.

    `settings` are those of `tensorprobe.capture`. A step begins with the first batch after the optimizer has stepped, so that
    micro-batches of gradient accumulation belong to one step, and a validation to the step before it (`microbatch` and
    `phase` of a call).
    """

    def __init__(self, out: str | os.PathLike[str], **settings: Any) -> None:
        self._out, self._settings = out, settings
        self._steps = 0
        self.probe: Probe | None = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Start to record."""
        self._steps = trainer.global_step
        self.probe = Probe(self._out, model=pl_module, **self._settings).start()

    def on_train_batch_start(self, trainer: Any, *given: Any, **named: Any) -> None:
        """Begin the next step, if the optimizer has stepped. Count a micro-batch: Lightning does not call the model itself."""
        if self.probe is not None:
            if trainer.global_step != self._steps:
                self._steps = trainer.global_step
                self.probe.step()
            self.probe.begin_microbatch()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Stop, and write the rest."""
        if self.probe is not None:
            self.probe.stop()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Stop: the training raised."""
        self.on_train_end(trainer, pl_module)
