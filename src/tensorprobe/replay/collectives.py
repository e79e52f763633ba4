"""Judges a recorded collective by the records of the ranks: the sum of their inputs against the result.

In: a run with the records of all ranks, and one rank's call. Out: a judged row for each output. A collective is judged only if all ranks
took part (no group is given) and each of them recorded it. If the kind of reduction was not recorded, the one that fits best counts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from tensorprobe.model import Call
from tensorprobe.model.dtypes import EPS
from tensorprobe.model.precheck import Checked
from tensorprobe.model.reason import NotReplayed
from tensorprobe.record.lines import Damage
from tensorprobe.record.run import Entry, Run
from tensorprobe.record.stored import StoredCall
from tensorprobe.replay.evidence import dtype_name
from tensorprobe.replay.functions import CannotReplay
from tensorprobe.replay.inputs import real
from tensorprobe.replay.isolation import read_call

Parts = Sequence[torch.Tensor]
_REDUCED = {
    "all_reduce": "input.0",
    "reduce": "input.0",
    "reduce_scatter_single": "input.1",
    "reduce_scatter_tensor": "input.1",
}
_MOVED = {
    "broadcast": "input.0",
    "all_gather": "input.1",
    "all_gather_single": "input.1",
    "all_gather_into_tensor": "input.1",
    "all_to_all_single": "input.1",
}
"""Collective → the slot that each rank contributes."""
_ARGUMENTS = {"broadcast": ("src", 1), "reduce": ("dst", 1)}


class Collectives:
    """Finds the calls of all ranks that belong to one collective, and judges its result."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._entries: dict[tuple[int, int], dict[str, list[Entry]]] = {}

    def check(self, call: StoredCall) -> list[Checked]:
        """Return a row for each output; CannotReplay with the reason why there is none."""
        name = call.op.rpartition(".")[2]
        slot = _REDUCED.get(name) or _MOVED.get(name)
        if slot is None:
            raise CannotReplay(f"there is no definition of the collective {name} here")
        calls = self._of_all_ranks(call)
        parts = [_values(each, slot) for each in calls]
        if len({part.shape for part in parts}) > 1:
            raise CannotReplay("the ranks contribute tensors of different shapes")
        made = {
            each.name.replace("output.changed", "output"): real(each)
            for each in call.slots
            if each.side == "output" and each.has_data
        }
        rows = _judge(call, name, parts, made, [each.rank for each in calls].index(call.rank))
        if not rows:
            raise CannotReplay("this rank receives nothing" if name == "reduce" else NotReplayed.NO_OUTPUTS)
        return rows

    def _of_all_ranks(self, call: StoredCall) -> list[StoredCall]:
        ranks = sorted(rank for _, rank in self._run.segments(call.step))
        if len(ranks) < self._run.manifest.world_size:
            raise CannotReplay(f"of {self._run.manifest.world_size:,} ranks only {len(ranks):,} were recorded")
        own = [self._whole(call.step, rank).get(call.op, []) for rank in ranks]
        at = next((at for at, entry in enumerate(own[ranks.index(call.rank)]) if entry.line == call.index), None)
        if at is None:
            raise CannotReplay("it was made in a group of ranks, and the record does not say which")
        if len({len(entries) for entries in own}) > 1:
            raise CannotReplay("the ranks did not record it equally often")
        return [read_call(self._run, call.step, rank, entries[at]) for rank, entries in zip(ranks, own, strict=True)]

    def _whole(self, step: int, rank: int) -> dict[str, list[Entry]]:
        """Return the collectives of all ranks that a rank took part in, by op, in execution order."""
        if (step, rank) not in self._entries:
            found: dict[str, list[Entry]] = {}
            for item in self._run.segment(step, rank).calls():
                if not isinstance(item, Damage) and _is_whole(item[1]):
                    line, call = item
                    found.setdefault(call.op, []).append(Entry(line, call.name, call.repeat))
            self._entries[step, rank] = found
        return self._entries[step, rank]


def _is_whole(call: Call) -> bool:
    grouped = any(isinstance(tree, dict) and "ProcessGroup" in str(tree.get("value")) for tree in call.args or [])
    return call.op.startswith("Distributed.") and not grouped and (call.kwargs or {}).get("group") is None


def _values(call: StoredCall, name: str) -> torch.Tensor:
    slot = next((each for each in call.slots if each.name == name), None)
    if slot is None or not slot.has_data:
        raise CannotReplay(f"rank {call.rank} did not record {name}")
    return real(slot)


def _judge(call: StoredCall, name: str, parts: Parts, made: Mapping[str, torch.Tensor], at: int) -> list[Checked]:
    if name in _REDUCED:
        result = made.get("output.0")
        end = _whole_number(call, name)
        if result is None or (name == "reduce" and at != end):
            return []
        if "scatter" in name:
            parts = [part.chunk(len(parts))[at] for part in parts]
        return [_reduced(result, parts, _reduction(call))]
    if name == "broadcast":
        wanted = {"output.0": parts[_whole_number(call, name)]}
    elif name == "all_gather":
        wanted = {f"output.0.{number}": part for number, part in enumerate(parts)}
    elif name == "all_to_all_single":
        if any((call.model.kwargs or {}).get(f"{side}_split_sizes") for side in ("input", "output")):
            raise CannotReplay("it splits its tensors unevenly")
        wanted = {"output.0": torch.cat([part.chunk(len(parts))[at] for part in parts])}
    else:
        wanted = {"output.0": torch.cat(list(parts))}
    return [_moved(slot, made[slot], expected) for slot, expected in wanted.items() if slot in made]


def _whole_number(call: StoredCall, name: str) -> int:
    """Return the rank that a broadcast comes from, or that a reduction goes to."""
    keyword, position = _ARGUMENTS.get(name, ("", 99))
    given, kwargs = call.model.args or [], call.model.kwargs or {}
    found = given[position] if position < len(given) else kwargs.get(keyword)
    found = kwargs.get(f"group_{keyword}", 0) if found is None else found
    return found if isinstance(found, int) else 0


def _reduction(call: StoredCall) -> str:
    """Return `SUM`, `AVG`, …; empty in records of other tools and in older records."""
    for tree in [*(call.model.args or []), *(call.model.kwargs or {}).values()]:
        if isinstance(tree, dict) and tree.get("type") == "torch.distributed.ReduceOp":
            return str(tree.get("value"))
    return ""


def _moved(slot: str, result: torch.Tensor, expected: torch.Tensor) -> Checked:
    if result.numel() != expected.numel():
        raise CannotReplay("its result has another size than what the ranks sent")
    expected = expected.reshape(result.shape)
    wrong = int((~((result == expected) | (result.isnan() & expected.isnan()))).sum())
    return _row(slot, result, expected, "different", float(wrong), "what the ranks sent")


def _reduced(result: torch.Tensor, parts: Parts, kind: str) -> Checked:
    """Compare with the reduction of that kind, or with the one that fits best. A sum may be rounded once for each rank."""
    wide = torch.stack([part.double() if part.is_floating_point() else part for part in parts])
    eps, count = EPS.get(dtype_name(result.dtype), 0.0), len(parts)
    size = wide.abs().sum(0)
    ways = {
        "SUM": (wide.sum(0), size), "AVG": (wide.double().mean(0), size / count),
        "PRODUCT": (wide.prod(0), wide.prod(0).abs()), "MAX": (wide.amax(0), torch.zeros_like(size)),
        "MIN": (wide.amin(0), torch.zeros_like(size)),
    }  # fmt: skip
    if kind and kind not in ways:
        raise CannotReplay(f"there is no definition of the reduction {kind} here")
    found = []
    for name, (expected, scale) in ways.items():
        off = (result.to(expected.dtype) - expected).abs().double()
        most = (off - count * eps * scale.double()).nan_to_num(0.0, posinf=float("inf")).max() if off.numel() else 0.0
        found.append((name, float(most), float(off.max()) if off.numel() else 0.0, expected))
    best = min(found, key=lambda each: (max(each[1], 0.0), each[2]))
    asked, most, _, expected = next((each for each in found if each[0] == kind), best)
    what = "a reduction of the ranks' inputs" if not kind else f"the {asked} of the ranks' inputs"
    what += f" but their {best[0]}" if most > 0.0 >= best[1] else ""
    return _row("output.0", result, expected, "beyond the rounding of the parts", max(most, 0.0), what)


def _row(slot: str, result: torch.Tensor, expected: torch.Tensor, by: str, measured: float, what: str) -> Checked:
    off, norm = (result.double() - expected.double()).nan_to_num(), float(expected.double().nan_to_num().norm())
    passes = measured <= 0.0
    return Checked(
        direction="forward",
        slot=slot,
        device_dtype=str(result.dtype),
        reference_dtype=str(expected.dtype),
        shape=list(result.shape),
        result="pass" if passes else "fail",
        judged_by=by,
        measured=measured,
        allowed=0.0,
        message="" if passes else f"forward {slot} is not {what}: {by} {measured:.3g}",
        relative_l2=float(off.norm()) / norm if norm else 0.0,
        max_abs=float(off.abs().max()) if off.numel() else 0.0,
        different=int((off != 0).sum()),
    )
