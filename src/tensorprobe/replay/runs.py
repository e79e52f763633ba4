"""Replays one call with one set of inputs: on the device, on the reference, and on the CPU in its own dtype.

In: a recorded call and inputs. Out: a row for each output and each gradient, judged. `CannotReplay` where the call cannot
be run at all, `DeviceRaised` where only the device cannot run it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import cached_property
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import numpy
import torch

from tensorprobe import torch_names
from tensorprobe.judge.standards import STANDARDS, Evidence, Standard, judge
from tensorprobe.model.dtypes import HALF
from tensorprobe.model.measured import Opinion
from tensorprobe.model.precheck import Checked
from tensorprobe.model.reason import NotReplayed
from tensorprobe.ops import Trait, breaks_ties, has, short_name
from tensorprobe.record.stored import StoredCall
from tensorprobe.replay.evidence import (
    TIMES,
    TIMES_HARD,
    Figures,
    dtype_name,
    gather,
    measure,
    nudged,
    on_host,
    shared_mask,
    spread,
    weigh,
    within_range,
)
from tensorprobe.replay.functions import CannotReplay
from tensorprobe.replay.indices import aligned, same_choice, vector_dimension
from tensorprobe.replay.inputs import Data, all_recorded, generator, make_inputs, real
from tensorprobe.replay.once import Replay
from tensorprobe.replay.randomness import (
    draws_random,
    drops,
    judge_dropped_gradient,
    judge_sample,
    runs_needed,
)

Tensors = dict[str, torch.Tensor]
Direction = Literal["forward", "backward"]
TIED = ("ties", "zeros")
"""The variants with equal values."""
STRICT = "subnormals"
"""The variant that tests subnormal numbers."""


class Conditions(NamedTuple):
    """The device, standard and settings of a check."""

    device: str
    data: Data
    standard: str
    variant: str = ""
    recorded: bool = False
    """Whether the recorded results are judged instead of a device's."""
    thorough: bool = False
    """Whether all evidence is gathered on recorded results that are clearly right, too."""


class ReferenceRaised(CannotReplay):
    """The reference rejects these inputs; it may accept others."""


class DeviceRaised(Exception):
    """The device raised, but the reference did not."""

    def __init__(self, message: str, direction: Direction) -> None:
        super().__init__(message)
        self.direction = direction


class Runs:
    """The replays of a call with these inputs. `device` is the one under test."""

    saved: Tensors | None = None
    """Values to use for outputs that the forward saves for its backward."""
    whole = False
    """Whether the gradients of outputs hold what comes from other outputs of the call, too."""
    joined: Mapping[str, str] = MappingProxyType({})
    """The gradients of inputs that are added to those of others."""

    def __init__(self, call: StoredCall, inputs: Tensors, conditions: Conditions) -> None:
        self.call, self.inputs, self._conditions = call, inputs, conditions
        self._standard: Standard = STANDARDS[conditions.standard]
        self.random = draws_random(call.model)
        self.alone = conditions.device == "cpu"
        self.precision = "own"
        """Of the reference: a key of `PRECISIONS`."""
        reference = self._other_draw() if self.random else self._wide()
        device = self._on_device(reference)
        self.given: Tensors = {}
        """The gradients of the outputs, once a backward has run."""
        self.gradients: Tensors = {}
        """The gradients of the inputs on the device."""
        self.evidence: dict[tuple[Direction, str], Evidence] = {}
        """The evidence on each output and gradient."""
        if isinstance(reference, Exception):
            narrow = isinstance(device, Replay)
            what = "the CPU cannot run it in a wider dtype:" if narrow else "it raises on the reference too:"
            raise ReferenceRaised(f"{what} {said(reference)}")
        if self.alone and has(call.op, Trait.DTYPE_TOLERANCE):
            raise CannotReplay("its result depends on the dtype, so a wider dtype is no reference")
        if isinstance(device, Exception):
            raise DeviceRaised(f"it raised on {conditions.device}: {said(device)}", "forward")
        self.device: Replay = device
        self.reference: Replay = reference

    @cached_property
    def own(self) -> Replay | Exception:
        """The call on the CPU in its own dtype."""
        return _attempt(lambda: self._replay("cpu", "own"))  # type: ignore[no-any-return]

    def _on_device(self, _reference: Replay | Exception) -> Replay | Exception:
        if self.alone:
            return self.own
        return _attempt(lambda: self._replay(self._conditions.device, "own"))  # type: ignore[no-any-return]

    def check_forward(self) -> list[Checked]:
        """Check every output."""
        if self.random:
            return self._check_samples()
        found = self._compare("forward", self.device.outputs, self.reference.outputs, lambda: _outputs(self.own))
        if not found:
            raise CannotReplay(NotReplayed.NO_TENSOR)
        return found

    def check_backward(self, recorded: StoredCall | None) -> list[Checked]:
        """Check the gradient of every input; return nothing if nothing is differentiable."""
        outputs = {
            name: output
            for name, output in self.device.differentiable().items()
            if vector_dimension(self.call.op, name) is None  # its gradient depends on the phase
        }
        if not outputs or (self._conditions.variant in TIED and breaks_ties(self.call.op)):
            return []
        self.given = self._gradients_of_outputs(outputs, recorded)
        if self.random:
            return self._check_random_backward()
        reference = _attempt(lambda: self.reference.gradients(self.given))
        if isinstance(reference, Exception):
            self.given = {}
            text = f"the reference has no backward: {said(reference)}"
            return [passed_over("backward", text, self._conditions.variant)]
        device = _attempt(lambda: self.device.gradients(self.given))
        if isinstance(device, Exception):
            raise DeviceRaised(f"its backward raised on {self._conditions.device}: {said(device)}", "backward")
        self.gradients = device
        return self._compare("backward", device, reference, lambda: device if self.alone else self._own_gradients())

    def _own_gradients(self) -> Tensors:
        own = self.own
        found = _attempt(lambda: own.gradients(self.given)) if isinstance(own, Replay) else None
        return found if isinstance(found, dict) else {}

    def ops_inside(self, directions: Collection[Direction]) -> list[str]:
        """Return the names of the ops that run inside the call on the device, in these directions."""
        found: dict[Direction, set[str]] = {"forward": set(), "backward": set()}
        try:
            with _naming_ops(found["forward"]):
                replay = self._replay(self._conditions.device, "own")
            with _naming_ops(found["backward"]):
                replay.gradients(self.given)
        except Exception:  # some ops do not run under a mode: then nothing is known
            return []
        return sorted(set().union(*(found[each] for each in directions)))

    def _replay(self, device: str, precision: str, inputs: Tensors | None = None, seed: int = 0) -> Replay:
        if self.random:
            torch.manual_seed(seed)
        else:  # seeding every device takes as long as the replay
            torch.default_generator.manual_seed(seed)
        given = self.inputs if inputs is None else inputs
        replay = Replay(self.call.model, given, device=device, precision=precision, saved=self.saved)
        replay.whole, replay.joined = self.whole, self.joined
        return replay

    def _wide(self) -> Replay | Exception:
        """Return the reference in the precision of the standard, or a narrower one if the op has no such kernel."""
        found: Replay | Exception = CannotReplay("no reference")
        for precision in ("double", "single") if self._standard.reference == "double" else ("single", "double"):
            if precision == "single" and not any(dtype_name(tensor.dtype) in HALF for tensor in self.inputs.values()):
                continue
            found = _attempt(lambda precision=precision: self._replay("cpu", precision))  # type: ignore[misc]
            if isinstance(found, Replay):
                self.precision = precision
                return found
        if not self.alone and isinstance(self.own, Replay):
            self.precision = "own"
            return self.own
        return found

    def _other_draw(self) -> Replay | Exception:
        return _attempt(lambda: self._replay("cpu", "own", seed=1))  # type: ignore[no-any-return]

    def _gradients_of_outputs(self, outputs: Mapping[str, torch.Tensor], recorded: StoredCall | None) -> Tensors:
        given: Tensors = {}
        held = {} if recorded is None else {f"output{slot.name[5:]}": slot for slot in recorded.inputs}
        for name, output in outputs.items():
            real_data = self._conditions.data == "real" and name in held and held[name].has_data
            if real_data and held[name].shape == tuple(output.shape):
                given[name] = real(held[name])
                continue
            source = generator(f"{self.call.name}:gradient:{name}")
            dtype = torch.complex128 if output.is_complex() else torch.float64
            given[name] = torch.randn(output.shape, generator=source, dtype=dtype).to(output.dtype)
        return given

    def _check_samples(self) -> list[Checked]:
        """Check the outputs of a random op, over enough runs for a distribution."""
        names = [name for name in self.device.outputs if name in self.reference.outputs]
        largest = max((self.device.outputs[name].numel() for name in names), default=0)
        device, other = ([first] for first in (self.device, self.reference))
        for number in range(1, runs_needed(self.call.model, largest)):
            device.append(self._replay(self._conditions.device, "own", seed=2 * number))
            other.append(self._replay("cpu", "own", seed=2 * number + 1))
        checked = []
        for name in names:
            shapes = {run.outputs[name].shape for run in (*device, *other)}
            if len(shapes) > 1:
                checked.append(passed_over("forward", f"{name} has another shape each time"))
                continue
            drawn, drawn_here = (torch.stack([on_host(run.outputs[name]) for run in runs]) for runs in (device, other))
            opinion = judge_sample(self.call.model, self.inputs, drawn, drawn_here)
            checked.append(self._row("forward", name, drawn_here[0], drawn[0], opinion, {}, None))
        if not checked:
            raise CannotReplay(NotReplayed.NO_TENSOR)
        return checked

    def _check_random_backward(self) -> list[Checked]:
        source = self.inputs.get("input.0")
        overwrites = short_name(self.call.op).endswith("_") and not drops(self.call.model)
        if overwrites or not any(slot.grad for slot in self.call.model.slots if slot.side != "output"):
            return []
        if not drops(self.call.model) or source is None or "output.0" not in self.given:
            return [passed_over("backward", "what it draws is different each time, and so is its gradient")]
        gradient = _attempt(lambda: self.device.gradients(self.given))
        if isinstance(gradient, Exception):
            raise DeviceRaised(f"its backward raised on {self._conditions.device}: {said(gradient)}", "backward")
        self.gradients = gradient
        found, output = on_host(gradient["output.0"]), on_host(self.device.outputs["output.0"])
        opinion = judge_dropped_gradient(source, output, self.given["output.0"], found)
        return [self._row("backward", "output.0", found, found, opinion, {}, None)]

    def _compare(
        self, direction: Direction, device: Tensors, reference: Tensors, compute_own: Callable[[], Tensors]
    ) -> list[Checked]:
        """Judge each result. `compute_own` gives those of the CPU in the call's own dtype, where they are needed."""
        checked: dict[str, Checked] = {}
        doubtful: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        right: dict[str, tuple[torch.Tensor, torch.Tensor, Opinion]] = {}
        names = list(dict.fromkeys([*device, *reference]))
        for name in names:
            if name not in device or name not in reference:
                who, other = ("the reference", "the device") if name in device else ("the device", "the reference")
                opinion = Opinion("absent", 1.0, 0.0)
                there = on_host((device if name in device else reference)[name])
                text = f"{direction} {name}: {who} gives none, {other} does"
                checked[name] = self._row(direction, name, there, there, opinion, {}, None, text)
                continue
            wide, result = on_host(reference[name]), on_host(device[name])
            if wide.shape != result.shape:
                text = f"{direction} {name} has shape {list(result.shape)}, the reference {list(wide.shape)}"
                checked[name] = self._row(direction, name, wide, result, Opinion("shape", 1.0, 0.0), {}, None, text)
                continue
            variant = self._conditions.variant
            if variant and _means_nothing(wide, result.dtype):
                text = f"{variant}: {name} is not a number, or beyond {str(result.dtype).removeprefix('torch.')}"
                checked[name] = passed_over(direction, text, variant)
                continue
            if (sure := self._at_sight(wide, result)) is not None:
                right[name] = wide, result, sure
            else:
                doubtful[name] = wide, result
        for (name, (wide, result, sure)), figures in zip(
            right.items(), measure([pair[:2] for pair in right.values()]), strict=True
        ):
            checked[name] = self._row(direction, name, wide, result, sure, figures, None)
        if doubtful:
            checked |= self._weigh(direction, doubtful, reference, compute_own())
        return [checked[name] for name in names if name in checked]

    def _at_sight(self, wide: torch.Tensor, result: torch.Tensor) -> Opinion | None:
        """Return the opinion on a result that needs no more evidence: none of a device under test."""
        return None

    def _weigh(
        self,
        direction: Direction,
        pairs: Mapping[str, tuple[torch.Tensor, torch.Tensor]],
        reference: Tensors,
        own: Tensors,
    ) -> dict[str, Checked]:
        """Judge pairs of reference and result by all the evidence."""
        checked = {}
        hosts: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        masks: Tensors = {}
        for name, (wide, result) in pairs.items():
            wide, result = within_range(wide, result.dtype), self._turned(direction, name, wide, result)
            if (mask := shared_mask(wide, result)) is not None:
                masks[name] = mask
                wide, result = wide.masked_fill(mask, 0), result.masked_fill(mask, 0)
            hosts[name] = wide, result
        evidence = self._evidence(direction, hosts, {**own, **_masked(own, masks)})
        opinions = weigh(
            evidence,
            {name: wide for name, (wide, _) in hosts.items()},
            lambda _, each: judge(self._standard, each),
            doubts=lambda _: self._standard.doubts,
            spread=lambda wides: self._spread(direction, reference, own, wides),
        )
        self.evidence |= {(direction, name): each for name, each in evidence.items()}
        for name, opinion in opinions.items():
            wide, result = hosts[name]
            as_good = direction == "forward" and same_choice(self.call.model, self.inputs, wide, result)
            if not opinion.passes and as_good:
                opinion = Opinion("different choices of equal values", 0.0, 0.0)
            seen = evidence[name]
            checked[name] = self._row(direction, name, wide, result, opinion, seen.device, seen.own)
        return checked

    def _turned(self, direction: Direction, name: str, wide: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
        """Return the result, with vectors in the phase of the reference."""
        dim = vector_dimension(self.call.op, name) if direction == "forward" else None
        return result if dim is None else aligned(wide, result, dim)

    def _evidence(
        self, direction: Direction, hosts: Mapping[str, tuple[torch.Tensor, torch.Tensor]], own: Tensors
    ) -> dict[str, Evidence]:
        mine = {
            name: self._turned(direction, name, wide, on_host(own[name]))
            for name, (wide, _) in hosts.items()
            if not self.alone and name in own and own[name].shape == wide.shape
        }
        inputs = [*self.inputs.values(), *self.given.values()]
        strict = self._conditions.variant == STRICT
        return gather(self.call.op, direction, hosts, mine, strict=strict, inputs=inputs)

    def _spread(
        self, direction: Direction, reference: Tensors, own: Tensors, wide: Mapping[str, torch.Tensor]
    ) -> dict[str, Figures]:
        """Measure how far the results change with the last bits of the inputs."""
        moves = []
        for number in range(TIMES_HARD if self._conditions.variant else TIMES):
            key = f"{self.call.name}:{number}"
            inputs = nudged(self.inputs, key, sparse=not self.alone)
            given = nudged(self.given, key, sparse=not self.alone)
            for precision, before in {"own": own, self.precision: reference}.items():
                replay = _attempt(lambda: self._replay("cpu", precision, inputs))  # noqa: B023 - run at once
                if isinstance(replay, Replay):
                    after = replay.outputs if direction == "forward" else _attempt(lambda: replay.gradients(given))  # noqa: B023
                    moves.append((before, after if isinstance(after, dict) else {}))
        return spread(moves, wide)

    def _row(
        self,
        direction: Direction,
        name: str,
        wide: torch.Tensor,
        result: torch.Tensor,
        opinion: Opinion,
        figures: Figures,
        own: Figures | None,
        message: str = "",
    ) -> Checked:
        variant = self._conditions.variant
        if not message and not opinion.passes:
            message = f"{direction} {name}: {opinion.judged_by} {opinion.measured:.3g}, allowed {opinion.allowed:.3g}"
        return Checked(
            direction=direction,
            slot=name,
            device_dtype=str(result.dtype),
            reference_dtype=str(wide.dtype),
            shape=list(result.shape),
            result="pass" if opinion.passes else "fail",
            judged_by=opinion.judged_by,
            measured=opinion.measured,
            allowed=opinion.allowed,
            message=f"{variant}: {message}" if message and variant else message,
            place=_place(figures, result.shape),
            compared=bool(figures),
            different=int(figures.get("different", 0)),
            nonfinite_different=int(figures.get("nonfinite_different", 0)),
            own_relative_l2=None if own is None else own["relative_l2"],
            variant=variant,
            **{name: figures[name] for name in _KEPT if name in figures},
        )


def prepare(call: StoredCall, conditions: Conditions) -> tuple[Runs, Data]:
    """Return the replays of a call and their data. If random data are invalid for the op, recorded data are used."""
    if conditions.recorded:
        from tensorprobe.replay.recorded import RecordedRuns  # which is made of this module

        return RecordedRuns(call, make_inputs(call, "real"), conditions), "real"
    try:
        return Runs(call, make_inputs(call, conditions.data), conditions), conditions.data
    except ReferenceRaised:
        if conditions.data == "real" or not all_recorded(call):
            raise
    return Runs(call, make_inputs(call, "real"), conditions._replace(data="real")), "real"


_KEPT = ("one_minus_cosine", "relative_l2", "max_abs", "max_rel", "within_1e3", "within_1e4", "ulp_max")


def _place(figures: Figures, shape: torch.Size) -> list[int]:
    flat = int(figures.get("max_abs_index", -1))
    return [] if flat < 0 or not figures.get("max_abs") else [int(at) for at in numpy.unravel_index(flat, shape)]


def passed_over(direction: Direction, message: str, variant: str = "") -> Checked:
    """Return a row for a result that was not compared, with the reason."""
    return Checked(
        direction=direction, slot="", device_dtype="", reference_dtype="", shape=[], result="skip",
        judged_by="", measured=0.0, allowed=0.0, message=message, variant=variant,
    )  # fmt: skip


def said(error: Exception) -> str:
    """Return the type and first line of an exception."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:200]}"


def _attempt(run: Callable[[], Any]) -> Any:
    """Return the result, or the exception that was raised. CannotReplay is passed on."""
    try:
        return run()
    except CannotReplay:
        raise
    except Exception as error:
        return error


def _means_nothing(wide: torch.Tensor, dtype: torch.dtype) -> bool:
    """Return whether a result of edge-case inputs is undefined: NaN, or too large for its dtype."""
    if not wide.is_floating_point() or not dtype.is_floating_point or dtype.itemsize < 2:
        return False
    return bool(wide.isnan().any()) or bool((wide.isfinite() & wide.to(dtype).isinf()).any())


def _masked(tensors: Tensors, masks: Tensors) -> Tensors:
    return {name: on_host(tensors[name]).masked_fill(mask, 0) for name, mask in masks.items() if name in tensors}


def _outputs(replay: Any) -> Tensors:
    return replay.outputs if isinstance(replay, Replay) else {}


def _naming_ops(names: set[str]) -> Any:
    """Return a context: ops that run inside, below autograd, add their names to `names`: `aten::mul`. Questions do not."""

    def dispatch(_: Any, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not isinstance(result := op(*args, **(kwargs or {})), bool):
            names.add(str(getattr(op, "_schema", op)).partition("(")[0].partition(".")[0])
        return result

    return type("Naming", (torch_names.DispatchMode,), {"__torch_dispatch__": dispatch})()
