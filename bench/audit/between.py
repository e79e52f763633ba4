"""Faults between calls: every kernel is right, and what a call reads is not what it should be.

python -m bench.audit.between [--families mixer,masked] [--recorded api,summary] [--only TEXT] [--json FILE]

Each family trains three steps on the CPU and on a second right device. A fault changes, unseen by the record, what one call
reads (transposed, rolled, other rows, scaled, of the step before, another parameter), or what enters a step (parameters,
gradients, buffers, data). The answer must name that call, that parameter or that gradient; healthy pairs must agree.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import tensorprobe
from bench.audit.__main__ import EVERY, run_here
from bench.audit.device import SecondDevice
from tensorprobe.engine import proof

Change = Callable[[Tensor], Tensor]
STEPS = 3

RECORDED: dict[str, dict[str, Any]] = {
    "api": {"level": "api"},
    "mix": {"level": "mix"},
    "aten": {"level": "aten"},
    "module": {"level": "module"},
    "forward": {"level": "api", "directions": ["forward"]},
    "summary": {"level": "api", "mode": "summary"},
}
"""What is recorded, by name."""


def _swapped(t: Tensor) -> Tensor:
    order = list(range(t.shape[0]))
    order[0], order[-1] = order[-1], order[0]
    return t[order]


def _one_row(t: Tensor) -> Tensor:
    return torch.cat((t[:1] * 1.05, t[1:]))


READS: dict[str, Change] = {
    "transposed": lambda t: t.transpose(-1, -2) if t.dim() > 1 and t.shape[-1] == t.shape[-2] else t,
    "rolled": lambda t: t.roll(1, -1),
    "rows swapped": _swapped,
    "scaled by 1.04": lambda t: t * 1.04,
    "shifted": lambda t: t + 0.05,
    "one row off": _one_row,
    "zeros": torch.zeros_like,
}
"""What a call reads instead of the tensor that it is given."""
READERS = (
    "linear",
    "matmul",
    "layer_norm",
    "gelu",
    "softmax",
    "conv2d",
    "add",
    "mul",
    "scaled_dot_product_attention",
    "tanh",
)


class Rewire(TorchFunctionMode):
    """Changes the first argument of the n-th call of a function, in one step, unseen: it lies above the mode that records."""

    def __init__(self, name: str, nth: int, step: int, change: Change, argument: int = 0) -> None:
        super().__init__()
        self._name, self._nth, self._step, self._change, self._argument = name, nth, step, change, argument
        self._count = 0
        self._held: Tensor | None = None
        self.step, self.struck = 0, False

    def begin(self, step: int) -> None:
        self.step, self._count = step, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") == self._name and len(args) > self._argument:
            given = args[self._argument]
            if isinstance(given, Tensor) and given.is_floating_point() and given.dim():
                self._count += 1
                if self._count == self._nth + 1:
                    args = (*args[: self._argument], self._read(given), *args[self._argument + 1 :])
        return func(*args, **(kwargs or {}))

    def _read(self, given: Tensor) -> Tensor:
        with torch._C.DisableTorchFunction():
            before, self._held = self._held, given.detach().clone()
            if self.step != self._step:
                return given
            changed = before if self._change is _stale else self._change(given)
            if changed is None or changed.shape != given.shape or torch.equal(changed, given):
                return given
            self.struck = True
            return changed


def _stale(t: Tensor) -> Tensor:
    return t


class Case(NamedTuple):
    """A fault: what must be named, and where it strikes."""

    name: str
    kind: str
    step: int
    read: tuple[str, int, Change] | None = None
    entering: Callable[[nn.Module, torch.optim.Optimizer], bool] | None = None
    when: str = ""
    """Of `entering`: "gradients" (before the optimizer), "parameters" (after it)."""
    data: Change | None = None


def _scale_parameter(model: nn.Module, factor: float) -> bool:
    largest = max(model.parameters(), key=lambda each: each.numel())
    largest.data.mul_(factor)
    return True


def _scale_all(model: nn.Module, factor: float) -> bool:
    for each in model.parameters():
        each.data.mul_(factor)
    return True


def _gradients(model: nn.Module, change: Change) -> bool:
    for each in model.parameters():
        if each.grad is not None:
            each.grad.copy_(change(each.grad))
    return True


def _noise(t: Tensor) -> Tensor:
    drawn = torch.randn(t.shape, generator=torch.Generator().manual_seed(1)).to(t.dtype)
    return t * (1 + 0.02 * drawn)


def _swap_parameters(model: nn.Module) -> bool:
    seen: dict[torch.Size, Tensor] = {}
    for each in model.parameters():
        if each.dim() > 1 and each.shape in seen:
            other = seen[each.shape]
            held = each.data.clone()
            each.data.copy_(other.data)
            other.data.copy_(held)
            return True
        seen[each.shape] = each
    return False


def _buffers(model: nn.Module) -> bool:
    for _name, each in model.named_buffers():
        if each.is_floating_point():
            each.mul_(1.01)
            return True
    return False


ENTERING: list[Case] = [
    Case("parameter x1.01", "enters", 2, None, lambda m, o: _scale_parameter(m, 1.01), "parameters"),
    Case("parameters x1.001", "enters", 1, None, lambda m, o: _scale_all(m, 1.001), "parameters"),
    Case("parameters swapped", "enters", 1, None, lambda m, o: _swap_parameters(m), "parameters"),
    Case("gradients x1.01", "enters", 1, None, lambda m, o: _gradients(m, lambda t: t * 1.01), "gradients"),
    Case("gradients 2 % noise", "enters", 1, None, lambda m, o: _gradients(m, _noise), "gradients"),
    Case("buffer x1.01", "enters", 1, None, lambda m, o: _buffers(m), "parameters"),
    Case("data row", "enters", 1, data=_one_row),
    Case("data shifted", "enters", 2, data=lambda t: t.roll(1, 0)),
]


def cases(calls: dict[str, int]) -> Iterator[Case]:
    """The faults for a model that makes these calls in a step."""
    changes = list(READS.items())
    for at, name in enumerate(each for each in READERS if each in calls):
        for number in range(3):
            text, change = changes[(at + 2 * number) % len(changes)]
            nth = number * max(calls[name] - 1, 0) // 2
            yield Case(f"{name}.{nth} reads {text}", "reads", number % 2, (name, nth, change))
        yield Case(f"{name}.0 reads of the step before", "reads", 1, (name, 0, _stale))
    yield from ENTERING


class _Count(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if args and isinstance(args[0], Tensor) and args[0].is_floating_point() and args[0].dim():
            self.calls[getattr(func, "__name__", "")] += 1
        return func(*args, **(kwargs or {}))


def record(folder: Path, family: str, how: str, device: SecondDevice | None, case: Case | None, optimizer: str) -> bool:
    """Record three steps; return whether the fault struck."""
    torch.manual_seed(5)
    model, loss = EVERY[family]()
    trained: torch.optim.Optimizer = (
        torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, foreach=False)
        if optimizer == "sgd"
        else torch.optim.AdamW(model.parameters(), 2e-3, foreach=False)
    )
    rewire = None if case is None or case.read is None else Rewire(case.read[0], case.read[1], case.step, case.read[2])
    struck = False
    settings: dict[str, Any] = {"in_process": True, "stacks": False, "overwrite": True, **RECORDED[how]}
    data = next(cell.cell_contents for cell in (loss.__closure__ or ()) if isinstance(cell.cell_contents, Tensor))
    with tensorprobe.capture(folder, model=model, **settings) as probe:
        for step in range(STEPS):
            kept = data.clone()
            with torch._C.DisableTorchFunction():
                if case is not None and case.step == step and case.data is not None:
                    changed = case.data(data) if data.is_floating_point() else data.roll(1, 0)
                    struck = not torch.equal(changed, data)
                    data.copy_(changed)
            with device or contextlib.nullcontext():
                trained.zero_grad()
                if rewire is not None:
                    rewire.begin(step)
                with rewire or contextlib.nullcontext():
                    loss().backward()
                with torch._C.DisableTorchFunction(), torch.no_grad():
                    data.copy_(kept)
                    if case is not None and case.when == "gradients" and case.step == step:
                        assert case.entering is not None
                        struck |= case.entering(model, trained)
                trained.step()
                with torch._C.DisableTorchFunction(), torch.no_grad():
                    if case is not None and case.when == "parameters" and case.step == step + 1:
                        assert case.entering is not None
                        struck |= case.entering(model, trained)
            probe.step()
    return struck or (rewire is not None and rewire.struck)


def named(case: Case, result: Any) -> str:
    summary = result.summary
    found = summary.divergence
    if summary.exit_code != 1 or found is None:
        return "missed" if summary.exit_code == 0 else "cannot tell"
    said = f"{found.step} {found.call} {found.status} {[each.name for each in summary.externals][:2]}"
    if found.step != case.step and not (case.when == "gradients" and found.step == case.step + 1):
        return f"misled: {said}"
    if found.status == "introduced":
        return f"misled: {said}"
    if case.read is not None and case.read[0] not in found.call:
        return f"misled: {said}"
    return "named"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--families", default="mixer,masked,graph,rotary autocast,mixer bf16")
    parser.add_argument("--recorded", default="api")
    parser.add_argument("--optimizer", default="adamw")
    parser.add_argument("--only", default="")
    parser.add_argument("--show", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    proof.run_in_processes = run_here  # type: ignore[assignment]
    total: dict[str, Counter[str]] = {}
    for family in options.families.split(","):
        for how in options.recorded.split(","):
            with tempfile.TemporaryDirectory() as work:
                torch.manual_seed(5)
                with _Count() as count:
                    EVERY[family]()[1]()
                right = Path(work) / "cpu"
                record(right, family, how, None, None, options.optimizer)
                other = Path(work) / "other"
                record(other, family, how, SecondDevice(), None, options.optimizer)
                healthy = tensorprobe.compare(right, other, keep_rows=False)
                counter = total.setdefault(how, Counter())
                counter["healthy" if healthy.exit_code == 0 else "false alarm"] += 1
                if healthy.exit_code:
                    print(f"FALSE ALARM {family} {how}", healthy if options.show else str(healthy).splitlines()[0])
                for case in cases(count.calls):
                    if options.only not in case.name or (how == "forward" and case.when == "gradients"):
                        continue
                    wrong = Path(work) / "wrong"
                    if not record(wrong, family, how, SecondDevice(), case, options.optimizer):
                        continue
                    result = tensorprobe.compare(right, wrong, keep_rows=False)
                    said = named(case, result)
                    counter[f"{case.kind} {said.partition(':')[0]}"] += 1
                    if said != "named":
                        print(f"{family} {how} | {case.name} at step {case.step} | {said}", flush=True)
                    if options.show:
                        print(result)
    for how, counter in total.items():
        print(how, dict(sorted(counter.items())))
    if options.json:
        options.json.write_text(json.dumps(total, indent=1))


if __name__ == "__main__":
    main()
