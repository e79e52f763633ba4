"""Judges the recorded results of one call against the same call, recomputed in float64 from its recorded inputs.

In: a recorded call, and its recorded backward if there is one. Out: a row for each recorded output and gradient, as for a
device under test: here that is the device that made the record. What was not recorded is not judged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from typing import Any

import torch

from tensorprobe.model.measured import Opinion
from tensorprobe.model.precheck import Checked
from tensorprobe.model.reason import NotReplayed
from tensorprobe.ops import Trait, has, short_name
from tensorprobe.record.stored import StoredCall, StoredSlot
from tensorprobe.replay.attention import DroppedAttention
from tensorprobe.replay.evidence import measure, on_host
from tensorprobe.replay.functions import CannotReplay
from tensorprobe.replay.inputs import real
from tensorprobe.replay.once import Replay, gradient_name
from tensorprobe.replay.randomness import argument_of, is_recurrent, judge_sample, runs_needed
from tensorprobe.replay.runs import Conditions, DeviceRaised, Direction, Runs, Tensors, passed_over, said
from tensorprobe.replay.sight import is_equal, opinion_at_sight


class RecordedRuns(Runs):
    """The replays of a call on the CPU. The recorded results take the place of those of a device."""

    def __init__(self, call: StoredCall, inputs: Tensors, conditions: Conditions) -> None:
        # An output is often saved for the backward, so gradients are computed from the recorded one: a wrong softmax is
        # not counted again in its gradient.
        self.saved = _values(slot for slot in call.slots if slot.side == "output")
        try:
            super().__init__(call, inputs, conditions._replace(device="cpu"))
        except DeviceRaised as found:
            raise CannotReplay(str(found)) from None
        recorded = {name: value for name, value in self.saved.items() if name in self.device.outputs}
        if not recorded:
            raise CannotReplay(NotReplayed.NO_OUTPUTS if self.device.outputs else NotReplayed.NO_TENSOR)
        self.alone = False
        self.device = _RecordedResults(self.device, recorded)

    def _on_device(self, reference: Replay | Exception) -> Replay | Exception:
        """Return a replay with the same outputs: in its own dtype the call runs only where the first look is not enough."""
        all_of_it = self.random or self._conditions.thorough or isinstance(reference, Exception)
        return self.own if all_of_it else reference

    def _at_sight(self, wide: torch.Tensor, result: torch.Tensor) -> Opinion | None:
        if self._conditions.thorough or self._conditions.standard != "noise-aware":
            return None
        return opinion_at_sight(self.call.op, wide, result)

    @property
    def _looks_elsewhere(self) -> bool:
        """Whether it was told where in the memory of its input to begin: nobody knows where in that memory the input stood."""
        name, call = short_name(self.call.op), self.call.model
        place = 4 if "scatter" in name else 3
        return name.startswith("as_strided") and argument_of(call, place, "storage_offset", None) is not None

    def check_forward(self) -> list[Checked]:
        """Check every recorded output. Autocast inside a recurrent layer shows in no dtype: it is recognised by the result."""
        checked = super().check_forward()
        if self._looks_elsewhere and any(row.result == "fail" for row in checked):
            raise CannotReplay(NotReplayed.ELSEWHERE)
        if all(row.result != "fail" for row in checked) or not is_recurrent(self.call.op):
            return checked
        for half in (torch.bfloat16, torch.float16):
            with torch.autocast("cpu", dtype=half):
                own = self._replay("cpu", "own")
            if all(
                _is_nearer(self.device.outputs[name], own.outputs[name], self.reference.outputs[name])
                for name in self.device.outputs
            ):
                self.own = own
                return super().check_forward()
        return checked

    def check_backward(self, recorded: StoredCall | None) -> list[Checked]:
        """Check every recorded gradient; nothing if no backward was recorded."""
        if recorded is None:
            return []
        assert isinstance(self.device, _RecordedResults)
        self.device.recorded_gradients = _values(slot for slot in recorded.slots if slot.side == "output")
        held = {f"output{slot.name[5:]}": slot.has_data for slot in recorded.inputs}
        outputs = list(self.device.differentiable())
        plain = [name for name in outputs if "changed" not in name]
        # Of several results, one that nobody used has no gradient: autograd takes zeros.
        unused = [name for name in plain if name not in held] if any(held.get(name) for name in plain) else []
        lacking = [name for name in outputs if not held.get(name) and name not in unused]
        if lacking or not self.device.recorded_gradients:
            what = f"the gradient of {lacking[0]}" if lacking else "its result"
            return [passed_over("backward", f"its backward is not judged: {what} was not recorded")]
        checked = super().check_backward(recorded)
        if self._looks_elsewhere and any(row.result == "fail" for row in checked):
            return [passed_over("backward", NotReplayed.ELSEWHERE)]
        if joined := self._joined():
            checked = self._better(recorded, checked, joined=joined)
        # Where one output is computed from another, the second has the gradient of both uses on this device.
        return self._better(recorded, checked, whole=True) if len(held) > 1 else checked

    def _joined(self) -> dict[str, str]:
        """An input that came twice has one gradient, recorded at its first place: find it for those that have none.

        It is known by its values, which another input may have too.
        """
        names = [slot.name for slot in self.call.model.slots if slot.grad and slot.name in self.inputs]
        had = [name for name in names if gradient_name(name) in self.device.gradients({})]
        found = {}
        for name in names:
            given = self.inputs[name]
            alike = (
                one for one in had if self.inputs[one].dtype is given.dtype and torch.equal(self.inputs[one], given)
            )
            if name not in had and (first := next(alike, None)) is not None:
                found[gradient_name(name)] = gradient_name(first)
        return found

    def _gradients_of_outputs(self, outputs: Mapping[str, torch.Tensor], recorded: StoredCall | None) -> Tensors:
        held = {f"output{slot.name[5:]}" for slot in (recorded.inputs if recorded else ())}
        return super()._gradients_of_outputs({name: outputs[name] for name in outputs if name in held}, recorded)

    def _better(self, recorded: StoredCall, checked: list[Checked], **use: Any) -> list[Checked]:
        """Where gradients fail, judge them again with `use` in the replays. Return what fails less."""
        failed = sum(row.result == "fail" for row in checked)
        if not failed:
            return checked
        before = {name: getattr(self, name) for name in use}
        self._use(use)
        again = super().check_backward(recorded)
        if sum(row.result == "fail" for row in again) < failed:
            return again
        self._use(before)
        return checked

    def _use(self, what: Mapping[str, Any]) -> None:
        for name, value in what.items():
            setattr(self, name, value)
        self.reference, self.own = self._replay("cpu", self.precision), self._replay("cpu", "own")

    def _compare(
        self, direction: Direction, device: Tensors, reference: Tensors, compute_own: Callable[[], Tensors]
    ) -> list[Checked]:
        known = {name: device[name] for name in device if name in reference}

        def computed() -> Tensors:
            if isinstance(self.own, Exception):
                raise CannotReplay(f"it raised on cpu: {said(self.own)}")
            return compute_own()

        return super()._compare(direction, known, {name: reference[name] for name in known}, computed)

    def _weigh(
        self,
        direction: Direction,
        pairs: Mapping[str, tuple[torch.Tensor, torch.Tensor]],
        reference: Tensors,
        own: Tensors,
    ) -> dict[str, Checked]:
        """A result with the bits that the CPU computes is no worse than the CPU: no more evidence is needed."""
        if self._conditions.thorough or self._conditions.standard != "noise-aware":
            return super()._weigh(direction, pairs, reference, own)
        same = {name: pair for name, pair in pairs.items() if name in own and is_equal(own[name], pair[1])}
        opinion = Opinion("equal to the CPU's result", 0.0, 0.0)
        checked = {
            name: self._row(direction, name, *pair, opinion, figures, figures)
            for (name, pair), figures in zip(same.items(), measure(list(same.values())), strict=True)
        }
        rest = {name: pair for name, pair in pairs.items() if name not in same}
        return checked | (super()._weigh(direction, rest, reference, own) if rest else {})

    @cached_property
    def _attention(self) -> DroppedAttention:
        return DroppedAttention(self.call.model, self.inputs)

    def _check_samples(self) -> list[Checked]:
        if not has(self.call.op, Trait.RANDOM_EACH):
            result = self.device.outputs["output.0"]
            return [self._row("forward", "output.0", result, result, self._attention.judge_forward(result), {}, None)]
        checked = []
        for name, drawn in self.device.outputs.items():
            others = [self.reference]
            while len(others) < runs_needed(self.call.model, drawn.numel()):
                others.append(self._replay("cpu", "own", seed=2 * len(others) + 1))
            here = torch.stack([on_host(run.outputs[name]) for run in others])
            opinion = judge_sample(self.call.model, self.inputs, drawn[None], here)
            checked.append(self._row("forward", name, here[0], drawn, opinion, {}, None))
        return checked

    def _check_random_backward(self) -> list[Checked]:
        if has(self.call.op, Trait.RANDOM_EACH) or not isinstance(self.own, Replay):
            return super()._check_random_backward()
        gradients = self.device.gradients(self.given)
        result = self.device.outputs["output.0"]
        found = self._attention.judge_backward(self.given["output.0"], result, gradients, self.own)
        return [
            self._row("backward", slot, gradients[slot], gradients[slot], opinion, {}, None)
            for slot, opinion in found.items()
        ]


class _RecordedResults(Replay):
    """A replay whose results are those of the record."""

    def __init__(self, replay: Replay, recorded: Tensors) -> None:
        self._replayed = replay
        self.outputs, self.changed, self.mutates = recorded, replay.changed, replay.mutates
        self.recorded_gradients: Tensors = {}

    def differentiable(self) -> dict[str, torch.Tensor]:
        return self._replayed.differentiable()

    def gradients(self, given: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return self.recorded_gradients


def _is_nearer(result: torch.Tensor, one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether a result is much nearer to one tensor than to another."""
    near, far = (float((on_host(result).double() - on_host(each).double()).norm()) for each in (one, other))
    return near < 0.5 * far


def _values(slots: Iterable[StoredSlot]) -> Tensors:
    return {slot.name: real(slot) for slot in slots if slot.has_data}
