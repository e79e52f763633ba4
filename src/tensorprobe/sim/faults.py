"""Faults as data: what goes wrong (`kind`, `params`) and where (every other field), and the table of those now
installed.

A `Fault` is frozen, comes from keywords, JSON or TOML, and is checked when made: an unknown field, kind or parameter
is an error that names the nearest known one. `perform` is called by the device for each op; it applies the installed
faults that match, in the order of installation. This module and all it imports at import time are free of torch.
"""

from __future__ import annotations

import json
import os
import random
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from tensorprobe.errors import SettingsError, did_you_mean
from tensorprobe.files import read_file

if TYPE_CHECKING:
    from tensorprobe.sim.kinds import OpCall


class Fault(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One kind of error and where it applies. The fields `op` and `module` may contain `*` and `?`."""

    op: str
    kind: str
    params: dict[str, Any] = {}
    nth: int | None = None
    """Only the n-th matching call, counted from 0 since the fault was installed."""
    since: int = 0
    """Every matching call from this one on."""
    module: str | None = None
    direction: Literal["forward", "backward"] | None = None
    dtype: str | None = None
    """Of the first floating-point input, as torch names it without `torch.`."""
    rank: int | None = None
    """Only in the process with this rank of the default process group (or RANK in the environment)."""
    output: int | None = 0
    """Which output is changed, for ops with several; null for all of them."""
    probability: float = 1.0
    seed: int = 0

    def as_dict(self) -> dict[str, Any]:
        """Return the fields that differ from their defaults, with the parameters beside them."""
        fields = {key: value for key, value in msgspec.to_builtins(self).items() if value != _DEFAULTS.get(key)}
        return {**{key: value for key, value in fields.items() if key != "params"}, **self.params}


_FIELDS = tuple(Fault.__struct_fields__)
_DEFAULTS = {
    key: value for key, value in msgspec.to_builtins(Fault(op="", kind="")).items() if key not in ("op", "kind")
}


def make_fault(**settings: Any) -> Fault:
    """Return a checked fault from flat settings: fields of `Fault`, and parameters of its kind beside them."""
    fields = {key: value for key, value in settings.items() if key in _FIELDS}
    params = {**fields.pop("params", {}), **{key: value for key, value in settings.items() if key not in _FIELDS}}
    for needed in ("op", "kind"):
        if needed not in fields:
            raise SettingsError(f"a fault needs {needed!r}; got {sorted(settings)}.")
    try:
        fault = msgspec.convert({**fields, "params": params}, Fault)
    except msgspec.ValidationError as wrong:
        raise SettingsError(f"fault on {fields['op']!r}: {wrong}.") from None
    _check_kind(fault)
    return fault


def _check_kind(fault: Fault) -> None:
    from tensorprobe.sim.kinds import KINDS, parameters_of  # imports torch

    if fault.kind not in KINDS:
        raise SettingsError(f"unknown kind of fault {fault.kind!r}.{did_you_mean(fault.kind, KINDS)}")
    known = parameters_of(fault.kind)
    for name in fault.params:
        if name not in known:
            hint = did_you_mean(name, (*known, *_FIELDS))
            raise SettingsError(
                f"kind {fault.kind!r} has no parameter {name!r} (it has {sorted(known) or 'none'}).{hint}"
            )
    if not 0 <= fault.probability <= 1:
        raise SettingsError(f"expected a probability between 0 and 1, got {fault.probability}.")


def read_faults(text: str) -> list[Fault]:
    """Read faults from text: catalog names separated by commas, the path of a .json or .toml file, or JSON itself."""
    text = text.strip()
    if text.startswith(("[", "{")):
        return _faults_of(_decode(text.encode(), "json", "the text given"), "the text given")
    if text.endswith((".json", ".toml")):
        path = Path(text)
        if not path.is_file():
            raise SettingsError(f"fault file {text!r} does not exist.")
        return _faults_of(_decode(read_file(path), path.suffix[1:], text), text)
    from tensorprobe.sim.known_faults import named_fault

    return [named_fault(name.strip()) for name in text.split(",") if name.strip()]


def _decode(content: bytes, form: str, where: str) -> Any:
    try:
        return msgspec.toml.decode(content) if form == "toml" else msgspec.json.decode(content)
    except (msgspec.DecodeError, ImportError) as wrong:
        raise SettingsError(f"cannot read the faults in {where}: {wrong}") from None


def _faults_of(decoded: Any, where: str) -> list[Fault]:
    entries = decoded.get("fault", [decoded]) if isinstance(decoded, dict) else decoded
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise SettingsError(f"faults in {where} must be a table or a list of tables ([[fault]] in TOML).")
    return [make_fault(**entry) for entry in entries]


def write_faults(faults: Iterable[Fault]) -> str:
    """Return the faults as JSON that `read_faults` reads."""
    return json.dumps([fault.as_dict() for fault in faults])


class Installed:
    """An installed fault with its counts, random stream and memory; `remove` uninstalls it."""

    def __init__(self, fault: Fault) -> None:
        self.fault = fault
        self.seen = 0
        self.fired = 0
        self.memory: dict[str, Any] = {}
        self._random = random.Random(fault.seed)
        self._lock = threading.Lock()

    def claims(self, dtype: str | None) -> bool | None:
        """Return whether the fault applies to this call of its op; None, without counting, if dtype, rank or module differ."""
        fault = self.fault
        if fault.dtype is not None and fault.dtype != dtype:
            return None
        if fault.rank is not None and fault.rank != _rank():
            return None
        if not self._in_place():
            return None
        with self._lock:
            number, self.seen = self.seen, self.seen + 1
            hit = number == fault.nth if fault.nth is not None else number >= fault.since
            hit = hit and (fault.probability >= 1 or self._random.random() < fault.probability)
            self.fired += hit
        return hit

    def _in_place(self) -> bool:
        from tensorprobe.sim.module_watch import WATCH, in_backward

        fault = self.fault
        direction = "backward" if fault.kind == "gradient" else fault.direction
        if direction is not None and (direction == "backward") != in_backward():
            return False
        return fault.module is None or fnmatchcase(WATCH.path(), fault.module)

    def remove(self) -> None:
        """Uninstall the fault; a second call does nothing."""
        if self in _INSTALLED:
            _INSTALLED.remove(self)
            _BY_OP.clear()
            if self.fault.module is not None:
                from tensorprobe.sim.module_watch import WATCH

                WATCH.stop()


_INSTALLED: list[Installed] = []
_BY_OP: dict[str, list[Installed]] = {}


def install(fault: Fault) -> Installed:
    """Install a fault until its handle's `remove` is called."""
    _check_kind(fault)
    handle = Installed(fault)
    if fault.module is not None:
        from tensorprobe.sim.module_watch import WATCH

        WATCH.start()
    _INSTALLED.append(handle)
    _BY_OP.clear()
    return handle


@contextmanager
def installed(faults: Iterable[Fault]) -> Iterator[list[Installed]]:
    """Install faults inside the `with`, and yield their handles."""
    handles = [install(fault) for fault in faults]
    try:
        yield handles
    finally:
        for handle in handles:
            handle.remove()


def active() -> list[Fault]:
    """Return the installed faults."""
    return [handle.fault for handle in _INSTALLED]


def _candidates(op: str) -> list[Installed]:
    found = _BY_OP.get(op)
    if found is None:
        found = _BY_OP[op] = [handle for handle in _INSTALLED if fnmatchcase(op, handle.fault.op)]
    return found


def concern(op: str) -> bool:
    """Return whether any installed fault names this op."""
    return bool(_candidates(op))


def perform(call: OpCall, dtype: Callable[[], str | None]) -> Any:
    """Return the result of `call` with the matching faults applied; `dtype` is called only if a fault names the op."""
    candidates = _candidates(call.name)
    if not candidates:
        return call.run()
    from tensorprobe.sim import kinds

    claims = [(handle, handle.claims(dtype())) for handle in candidates]
    result = _perform_claimed(call, [handle for handle, hit in claims if hit])
    for handle, hit in claims:
        if hit is False:
            kinds.witness(handle.fault.kind, result, handle.memory)
    return result


def _perform_claimed(call: OpCall, handles: list[Installed]) -> Any:
    from tensorprobe.sim import kinds

    if not handles:
        return call.run()
    *inner, last = handles
    wrapped = kinds.OpCall(
        name=call.name,
        operation=call.operation if not inner else lambda *_a, **_k: _perform_claimed(call, inner),
        args=call.args,
        kwargs=call.kwargs,
        outputs=call.outputs,
        memory=last.memory,
    )
    return kinds.perform(last.fault.kind, wrapped, last.fault.output, last.fault.params)


def _rank() -> int:
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        return int(dist.get_rank())
    return int(os.environ.get("RANK", "0"))
