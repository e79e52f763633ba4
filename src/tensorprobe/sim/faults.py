"""Faults as data: what goes wrong (`kind`, `params`), where (every other field), and which are installed.

A `Fault` is frozen, comes from keywords, JSON or TOML, and is checked when made: an unknown field, kind or parameter
is an error that names the nearest known one. `perform` is called by the device for each op; it applies the installed
faults that match, in the order of installation. This module and all it imports at import time are free of torch.
"""

from __future__ import annotations

import gc
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
from tensorprobe.files import read_settings, read_toml

if TYPE_CHECKING:
    from tensorprobe.sim.kinds import OpCall


class Fault(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One kind of error, and where it applies. The fields `op` and `module` may contain `*` and `?`."""

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
    name: str = ""
    """Its name in messages."""
    elsewhere: int = 0
    """After this many calls of the model without a hit, the fault takes another call; 0: never."""
    otherwise: str = ""
    """The op that it takes then if the program does not use `op`."""

    @property
    def waits_for(self) -> str:
        """The calls that it affects, in words: `the third native_layer_norm in module blocks.1`."""
        op = self.op.partition("::")[2] or self.op
        since = f"every {op}, from the {_ordinal(self.since)} on," if self.since else f"every {op}"
        parts = [since if self.nth is None else f"the {_ordinal(self.nth)} {op}"]
        if self.direction or self.kind == "gradient":
            parts.append(f"in {'backward' if self.kind == 'gradient' else self.direction}")
        parts += [f"in module {self.module}"] if self.module else []
        parts += [f"of dtype {self.dtype}"] if self.dtype else []
        parts += [f"on rank {self.rank}"] if self.rank is not None else []
        parts += [f"with probability {self.probability:g}"] if self.probability < 1 else []
        return " ".join(parts).removesuffix(",")

    def as_dict(self) -> dict[str, Any]:
        """Return the fields that differ from their defaults, with the parameters beside them."""
        fields = {key: value for key, value in msgspec.to_builtins(self).items() if value != _DEFAULTS.get(key)}
        return {**{key: value for key, value in fields.items() if key != "params"}, **self.params}


def _ordinal(number: int) -> str:
    """Return `1st` for 0, `2nd` for 1, …"""
    last = (number + 1) % 100
    return f"{number + 1}{'th' if 10 < last < 20 else {1: 'st', 2: 'nd', 3: 'rd'}.get(last % 10, 'th')}"


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
        return _faults_of(_decode(text.encode(), "the text given"), "the text given")
    if text.endswith((".json", ".toml")):
        path = Path(text)
        if not path.is_file():
            raise SettingsError(f"fault file {text!r} does not exist.")
        return _faults_of(_decode(path, text), text)
    from tensorprobe.sim.known_faults import named_fault

    return [named_fault(name.strip()) for name in text.split(",") if name.strip()]


def _decode(given: bytes | Path, where: str) -> Any:
    try:
        if isinstance(given, Path) and given.suffix == ".toml":
            return read_toml(given)
        return msgspec.json.decode(given if isinstance(given, bytes) else read_settings(given))
    except (ValueError, RecursionError) as wrong:
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
        self.op, self.module, self.nth, self.since = fault.op, fault.module, fault.nth, fault.since
        self.met = 0
        """Calls of its op."""
        self.seen = 0
        """Calls that also have its dtype, rank, module and direction."""
        self.fired = 0
        """Calls that it affected."""
        self.changed = 0
        """Calls whose result it changed."""
        self._passes = 0
        self.memory: dict[str, Any] = {}
        self._random = random.Random(fault.seed)
        self._lock = threading.Lock()

    def claims(self, dtype: str | None) -> bool | None:
        """Return whether the fault applies to this call of its op; None, without counting, if dtype, rank or module differ."""
        fault = self.fault
        self.met += 1
        if fault.dtype is not None and fault.dtype != dtype:
            return None
        if fault.rank is not None and fault.rank != _rank():
            return None
        if not self._in_place():
            return None
        with self._lock:
            number, self.seen = self.seen, self.seen + 1
            hit = number == self.nth if self.nth is not None else number >= self.since
            hit = hit and (fault.probability >= 1 or self._random.random() < fault.probability)
            self.fired += hit
        return hit

    def _in_place(self) -> bool:
        from tensorprobe.sim.module_watch import WATCH, in_backward

        fault = self.fault
        direction = "backward" if fault.kind == "gradient" else fault.direction
        if direction is not None and (direction == "backward") != in_backward():
            return False
        return self.module is None or fnmatchcase(WATCH.path(), self.module)

    def next_pass(self, paths: Iterable[str]) -> None:
        """Note that the model is about to be called; `paths` are its modules. A fault of the catalog may take another call.

        It does so at once if there is no such module, and otherwise if no call so far matched.
        """
        passes, self._passes = self._passes, self._passes + 1
        if self.fired or not self.fault.elsewhere:
            return
        if self.module is not None and not any(fnmatchcase(path, self.module) for path in paths):
            self.module = None
        if passes < self.fault.elsewhere:
            return
        if self.seen:
            self.nth = None if self.nth is None else self.seen + self.seen // passes - 1
            self.since = 0
        elif not self.met and self.fault.otherwise:
            self.op = self.fault.otherwise
            _BY_OP.clear()

    def silence(self) -> str | None:
        """Return why the fault changed nothing; None if it did, or does not concern this process."""
        fault = self.fault
        if self.changed or (fault.rank is not None and fault.rank != _rank()):
            return None
        name = f"fault {fault.name or fault.op}"
        if self.fired:
            return f"{name} struck {self.fired:,} calls, and none of their results changed."
        if not self.met:
            return f"{name} matched 0 calls: the program did not run {self.op} on the device."
        if not self.seen:
            return f"{name} matched 0 of {self.met:,} calls of {self.op}. It waits for {fault.waits_for}."
        return f"{name} struck 0 of {self.seen:,} matching calls. It waits for {fault.waits_for}."

    def remove(self) -> None:
        """Uninstall the fault; a second call does nothing."""
        if self in _INSTALLED:
            _INSTALLED.remove(self)
            _BY_OP.clear()
            if self.fault.module is not None or self.fault.elsewhere:
                from tensorprobe.sim.module_watch import WATCH

                WATCH.stop(self.next_pass)


_INSTALLED: list[Installed] = []
_BY_OP: dict[str, list[Installed]] = {}


def install(fault: Fault) -> Installed:
    """Install a fault until its handle's `remove` is called."""
    _check_kind(fault)
    handle = Installed(fault)
    if fault.module is not None or fault.elsewhere:
        from tensorprobe.sim.module_watch import WATCH

        WATCH.start(handle.next_pass)
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


def silent() -> list[str]:
    """Return a sentence for each installed fault that changed nothing.

    A process that neither uses the device nor has a module, such as a launcher, is not affected by the faults.
    """
    if not _BY_OP:
        import torch

        if not any(issubclass(type(held), torch.nn.Module) for held in gc.get_objects()):
            return []
        return ["no fault could strike: the program ran nothing on the simulated device. Does it select that device?"]
    return [reason for handle in _INSTALLED if (reason := handle.silence())]


def _candidates(op: str) -> list[Installed]:
    found = _BY_OP.get(op)
    if found is None:
        found = _BY_OP[op] = [handle for handle in _INSTALLED if fnmatchcase(op, handle.op)]
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
    result, changed = kinds.perform(last.fault.kind, wrapped, last.fault.output, last.fault.params)
    last.changed += changed
    return result


def _rank() -> int:
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        return int(dist.get_rank())
    return int(os.environ.get("RANK", "0"))
