"""`set_dump_path`, `register_hook`, `set_dump_switch`, `set_backward_input`: when and where a program is dumped.

The older tool kept these in the process, and so do we: one target, one model, one switch. Each "ON" begins a new dump in
the target and replaces what is there; numbers of calls start from 0 with it. `set_overflow_check_switch` is the switch of
an overflow check, which is on from its `register_hook` on.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tensorprobe import torch_names
from tensorprobe.errors import SettingsError, UnknownSetting, did_you_mean
from tensorprobe.legacy.layouts.dump_sink import DumpSink
from tensorprobe.legacy.layouts.targets import PtdbgTarget
from tensorprobe.legacy.ptdbg import acl, logger, speak
from tensorprobe.legacy.ptdbg.overflow import Order as OverflowOrder
from tensorprobe.legacy.ptdbg.overflow import OverflowCheck, read_count
from tensorprobe.legacy.wrapped import RULES
from tensorprobe.model.sink import Needs
from tensorprobe.ops.names import FAMILIES, ONE_FUNCTION, family_of, parse_call_name, underscored
from tensorprobe.taps import Probe, active_probe
from tensorprobe.taps.ranks import find_rank_of

VERSION = "1.0"
"""Of the layout on disk, as the guide shows it: `ptdbg_dump_v1.0`."""

MODES = ("all", "list", "range", "stack", "acl", "api_list", "api_stack")
_DIRECTIONS = {"all": ("forward", "backward"), "forward": ("forward",), "backward": ("backward",)}
_SCOPES: dict[str, tuple[Callable[[int], bool], str]] = {
    "list": (lambda count: count > 0, "at least one name"),
    "range": (lambda count: count == 2, "two names, the first and the last call"),
    "stack": (lambda count: count in (0, 2), "two names, the first and the last call, or none for all"),
    "acl": (lambda count: count == 1, "exactly one name"),
}
_OPTIONS = ("overflow_nums", "dump_mode", "dump_config", "rank", "dump_step")
_PREFIX = "api_stack_"


def acc_cmp_dump(*_: Any, **__: Any) -> None:
    """For `register_hook(model, acc_cmp_dump)`: says that calls are to be dumped. Not meant to be called."""


def overflow_check(*_: Any, **__: Any) -> None:
    """For `register_hook(model, overflow_check)`: says that overflows are looked for. Not meant to be called."""


@dataclass(frozen=True)
class Target:
    """The model, and where its dump goes."""

    model: Any
    pkl: Path
    rank: int
    dump_step: int
    config: Path | None


@dataclass(frozen=True)
class Order:
    """A checked `set_dump_switch("ON", …)`."""

    mode: str
    names: tuple[str, ...]
    ops: tuple[str, ...]
    everything: bool
    directions: tuple[str, ...]


@dataclass
class _State:
    path: Path | None = None
    tag: str = "ptdbg_dump"
    step: str = ""
    target: Target | None = None
    waiting: Order | None = None
    probe: Probe | acl.AclDump | None = None
    overflow: OverflowCheck | None = None
    overflow_switch: tuple[str, str] = ("ON", "ON")
    """As set by `set_overflow_check_switch`: the switch and the filter."""
    gradients: list[Path] = field(default_factory=list)


_state = _State()


def set_dump_path(fpath: str | os.PathLike[str] | None = None, dump_tag: str = "ptdbg_dump") -> None:
    """Where the next `register_hook` puts its dump: `./npu_dump.pkl` gives `./{dump_tag}_v1.0/rank0/npu_dump.pkl`."""
    speak()
    if not isinstance(fpath, (str, os.PathLike)) or not os.fspath(fpath):
        raise SettingsError(f"set_dump_path takes the path of a pkl file, such as './npu_dump.pkl'; got {fpath!r}.")
    path = Path(fpath)
    if path.is_dir():
        raise SettingsError(f"set_dump_path: '{path}' is a folder. Name the file too: '{path / 'npu_dump.pkl'}'.")
    if (
        not isinstance(dump_tag, str)
        or not dump_tag
        or {"/", os.sep, "\0"} & set(dump_tag)
        or dump_tag.strip(".") == ""
    ):
        raise SettingsError(f"dump_tag is {dump_tag!r}; it becomes part of a folder's name and must be such a name.")
    _state.path, _state.tag = (path if path.suffix else path.with_suffix(".pkl")).absolute(), dump_tag
    _state.step = ""
    if _state.target is not None:
        logger.info("set_dump_path: '%s' is used from the next register_hook on.", path)


def register_hook(model: torch.nn.Module, hook: Callable[..., Any], **options: Any) -> None:
    """Say which model is dumped, or looked through for overflows, and make the folder of its rank.

    Options: `rank`; `dump_mode="acl"` with `dump_config`, the path of a dump.json; `dump_step`, a number for the pkl;
    `overflow_nums`, with which overflow the training ends.
    """
    speak()
    for key in options:
        if key not in _OPTIONS:
            raise UnknownSetting(f"register_hook has no argument {key!r}.{did_you_mean(key, _OPTIONS)}")
    if hook not in (acc_cmp_dump, overflow_check):
        raise SettingsError(f"register_hook takes acc_cmp_dump or overflow_check as its second argument; got {hook!r}.")
    if not hasattr(model, "named_modules"):
        raise SettingsError(f"register_hook takes a torch.nn.Module as its first argument; got {type(model).__name__}.")
    if _state.probe is not None:
        logger.warning('register_hook while the dump is on: it ends here. Call set_dump_switch("ON") again.')
        _end()
    most = read_count(options.get("overflow_nums", 1)) if hook is overflow_check else 0
    rank = options.get("rank")
    if rank is None:
        rank = find_rank_of(model)
    if isinstance(rank, bool) or not isinstance(rank, int) or rank < 0:
        raise SettingsError(f"rank is {rank!r}; it must be a whole number from 0 on.")
    dump_mode, config = options.get("dump_mode", "api"), options.get("dump_config")
    if dump_mode not in ("api", "acl"):
        raise SettingsError(f"dump_mode is {dump_mode!r}; register_hook takes 'api' or 'acl'.")
    if dump_mode == "acl" and config is None:
        raise SettingsError("dump_mode='acl' needs dump_config='dump.json', the path of its settings.")
    settings = None if config is None else acl.read_dump_config(config)
    _end_overflow()
    path = _state.path
    if hook is overflow_check:
        _register_overflow(model, rank, most, settings if dump_mode == "acl" else None)
        return
    if path is None:
        path = Path("anonymous.pkl").absolute()
        logger.warning(
            "register_hook before set_dump_path: the dump goes to '%s'. A set_dump_path after this has no effect on it.",
            path.parent / f"{_state.tag}_v{VERSION}" / _state.step / f"rank{rank}" / path.name,
        )
    folder = path.parent / f"{_state.tag}_v{VERSION}" / _state.step / f"rank{rank}"
    folder.mkdir(parents=True, exist_ok=True)
    dump_step = options.get("dump_step", 1)
    _state.target = Target(
        model, folder / path.name, rank, dump_step, None if config is None else Path(config).absolute()
    )
    logger.info("register_hook: rank %d of '%s'. Begin with set_dump_switch(\"ON\").", rank, folder)
    if _state.waiting is not None:
        _begin(_state.target, _state.waiting)


def register_step(step: str, pkl: Path, model: torch.nn.Module, hook: Callable[..., Any], **options: Any) -> None:
    """`set_dump_path` and `register_hook` for one step, whose dump goes into the folder `step` above those of the ranks."""
    set_dump_path(pkl)
    _state.step = step
    register_hook(model, hook, **options)


def set_dump_switch(
    switch: str,
    mode: str = "all",
    scope: Sequence[str] = (),
    api_list: Sequence[str] = (),
    filter_switch: str = "ON",
    dump_mode: str | Sequence[str] = "all",
) -> None:
    """Begin a dump ("ON") or end it ("OFF"). The modes are those of the guide; docs/migrating.md lists them."""
    speak()
    if switch not in ("ON", "OFF"):
        raise SettingsError(f'set_dump_switch takes "ON" or "OFF"; got {switch!r}.')
    if switch == "OFF":
        if _state.probe is None:
            logger.warning('set_dump_switch("OFF"): no dump is on.')
        _state.waiting = None
        _end()
        return
    order = read_order(mode, scope, api_list, filter_switch, dump_mode)
    if _state.target is None:
        logger.warning('set_dump_switch("ON") before register_hook: the dump begins when register_hook is called.')
        _state.waiting = order
        return
    _begin(_state.target, order)


def set_overflow_check_switch(switch: str, filter_switch: str = "ON") -> None:
    """Look for overflows ("ON") or not ("OFF"). `filter_switch="OFF"`: the dump of an overflow has its scalars, too."""
    speak()
    for name, given in (("switch", switch), ("filter_switch", filter_switch)):
        if given not in ("ON", "OFF"):
            raise SettingsError(f'{name} of set_overflow_check_switch is {given!r}; it must be "ON" or "OFF".')
    _state.overflow_switch = (switch, filter_switch)
    if _state.overflow is None:
        logger.warning("set_overflow_check_switch before register_hook(model, overflow_check): it is heeded then.")
    else:
        _switch_overflow(_state.overflow)


def set_backward_input(backward_input: Sequence[str | os.PathLike[str]]) -> None:
    """The gradients, as .npy files, for the backward of the one API that `mode="acl"` dumps."""
    speak()
    if isinstance(backward_input, (str, os.PathLike)) or not backward_input:
        raise SettingsError(f"set_backward_input takes a list of .npy files; got {backward_input!r}.")
    paths = [Path(path) for path in backward_input]
    for path in paths:
        if not path.is_file():
            raise SettingsError(f"set_backward_input: no file '{path}'.")
    acl.load_gradients(paths)  # what cannot be read is refused now, not in the middle of training
    _state.gradients[:] = [path.absolute() for path in paths]


def _register_overflow(model: torch.nn.Module, rank: int, most: int, config: acl.DumpConfig | None) -> None:
    """Begin the overflow check, unless it was switched off before. It needs no name of a file, only a folder."""
    home = Path.cwd() if _state.path is None else _state.path.parent
    folder = home / f"{_state.tag}_v{VERSION}" / _state.step / f"rank{rank}"
    folder.mkdir(parents=True, exist_ok=True)
    check = OverflowCheck(OverflowOrder(model, folder, rank, most, config))
    _switch_overflow(check)
    _state.overflow = check
    logger.info("register_hook: rank %d of '%s'; the training ends with overflow %d.", rank, folder, most)


def _switch_overflow(check: OverflowCheck) -> None:
    switch, filter_switch = _state.overflow_switch
    if switch == "OFF":
        check.stop()
        return
    if _state.probe is not None:
        raise SettingsError('an overflow check cannot run while a dump is on. Call set_dump_switch("OFF") first.')
    check.start(everything=filter_switch == "OFF")


def _end_overflow() -> None:
    check, _state.overflow = _state.overflow, None
    if check is not None:
        _state.overflow_switch = ("ON", "ON")  # it was for this check
        check.stop()
        logger.info("The overflow check has ended; overflows: %d.", check.count)


def read_order(mode: Any, scope: Any, api_list: Any, filter_switch: Any, dump_mode: Any) -> Order:
    """Return the arguments of `set_dump_switch("ON", …)`, checked."""
    if mode not in MODES:
        raise SettingsError(f"mode is {mode!r}; it must be one of {', '.join(MODES)}.{did_you_mean(str(mode), MODES)}")
    if filter_switch not in ("ON", "OFF"):
        raise SettingsError(f'filter_switch is {filter_switch!r}; it must be "ON" or "OFF".')
    directions: list[str] = []
    for direction in [dump_mode] if isinstance(dump_mode, str) else dump_mode:
        if direction not in _DIRECTIONS:
            raise SettingsError(f"dump_mode is {direction!r}; set_dump_switch takes {', '.join(_DIRECTIONS)}.")
        directions += _DIRECTIONS[direction]
    names = read_names(scope, "scope")
    allowed, said = _SCOPES.get(mode, (lambda count: True, ""))
    if not allowed(len(names)):
        raise SettingsError(
            f"mode {mode!r} needs {said} in scope; got {len(names)}.\n"
            f'  For example set_dump_switch("ON", mode="{mode}", scope=["Tensor_abs_1_forward", '
            f'"Tensor_transpose_3_forward"]{"[:1]" if mode == "acl" else ""})'
        )
    if mode not in _SCOPES and names:
        logger.warning("scope has no meaning in mode %r: everything is dumped. Use mode 'list' or 'range'.", mode)
        names = ()
    if isinstance(api_list, str) or not all(isinstance(api, str) and api for api in api_list):
        raise SettingsError(f"api_list takes a list of names of APIs, such as ['relu']; got {api_list!r}.")
    if mode == "api_list" and not api_list:
        raise SettingsError("mode 'api_list' needs names of APIs: api_list=['relu'].")
    warn_of_unknown(names)
    ops = read_apis(api_list) if mode == "api_list" else ()
    return Order(mode, names, ops, filter_switch == "OFF", tuple(dict.fromkeys(directions)))


def _begin(target: Target, order: Order) -> None:
    if _state.probe is not None:
        logger.warning('set_dump_switch("ON") while the dump is on: it begins anew.')
        _end()
    if _state.overflow is not None and _state.overflow.watching:
        raise SettingsError(
            'the overflow check is on. Call set_overflow_check_switch("OFF") before set_dump_switch("ON").'
        )
    running = active_probe()
    if running is not None:
        raise SettingsError(f"a recording into '{running.out}' is running in this process. Stop it first.")
    _state.waiting = None
    if order.mode == "acl":
        _state.probe = acl.begin(target.model, order.names[0], target.config, _state.gradients, rank=target.rank)
        return
    pkl = target.pkl.with_name(_PREFIX + target.pkl.name) if order.mode == "api_stack" else target.pkl
    stack_only = order.mode == "stack"
    if pkl.exists():
        logger.info("'%s' is replaced. To keep a dump, call set_dump_path and register_hook before the next.", pkl)
    wanted = PtdbgTarget(
        str(pkl),
        None if stack_only else str(pkl.with_suffix("")),
        everything=order.everything,
        stacks=order.mode not in ("all", "api_list"),
        dump_step=target.dump_step,
    )
    spans = order.mode in ("range", "stack") and order.names
    _state.probe = Probe(
        pkl,
        model=target.model,
        rank=target.rank,
        sink=DumpSink(pkl, wanted, needs=Needs(rules=RULES)),
        mode="structure" if stack_only else "tensor",
        stacks=wanted.stacks,
        names=order.names if order.mode == "list" else (),
        span=order.names if spans else None,
        ops=order.ops,
        directions=order.directions,
    ).start()


def _end() -> None:
    probe, _state.probe = _state.probe, None
    if probe is None:
        return
    coverage = probe.stop()
    if isinstance(probe, acl.AclDump):
        _state.gradients.clear()
    if coverage is not None:
        if isinstance(probe, acl.AclDump) and probe.is_foreign:
            logger.info("What torch_npu dumps goes to '%s'.", probe.out)
        else:
            calls, size_bytes = f"{coverage.recorded:,}", f"{coverage.bytes_written:,}"
            logger.info("Dumped %s calls, %s bytes, to '%s'.", calls, size_bytes, probe.out)
        for note in [*coverage.notes, *coverage.blind_spots]:
            logger.warning("Not in the dump: %s", note)
        for reason, count in coverage.slots_skipped.items():
            logger.warning("Not in the dump: %d tensors: %s", count, reason)


atexit.register(_end_overflow)
atexit.register(_end)  # a program that ends without "OFF" is told the same of its dump


_HOMES = {
    "Tensor": torch.Tensor,
    "Torch": torch,
    "Functional": torch.nn.functional,
    "VF": torch_names.recurrent_functions,
}


def read_names(scope: Any, argument: str) -> tuple[str, ...]:
    """The names as capture gives them; SettingsError for what cannot be the name of a call."""
    if isinstance(scope, str) or not all(isinstance(name, str) for name in scope):
        raise SettingsError(
            f"{argument} takes a list of names of calls, such as ['Tensor_permute_1_forward']; got {scope!r}."
        )
    return tuple(_read(name, argument) for name in scope)


def _read(name: str, argument: str) -> str:
    parts = parse_call_name(name)
    if not (parts.number and parts.direction) or family_of(name) not in FAMILIES:
        raise SettingsError(
            f"{argument} has {name!r}, which is not the name of a call.\n"
            "  Such names are {prefix}_{api}_{number}_{forward or backward}, as a dump has them: Tensor_permute_1_forward. "
            f"Prefixes: {', '.join(FAMILIES)}."
        )
    family, _, api = parts.op.partition(".")
    if family == "Torch" and api in ONE_FUNCTION:  # capture cannot tell which of the two the program wrote
        parts = parts._replace(op=f"Functional.{api}")
    return str(parts)


def read_apis(api_list: Sequence[str]) -> tuple[str, ...]:
    """Patterns for the names of APIs, with or without their prefix, in upper or lower case."""
    return tuple(map(_read_api, api_list))


def _read_api(api: str) -> str:
    family, _, rest = api.partition("_")
    name = f"{family}.{rest}" if family in FAMILIES and rest else f"*.{api}"
    return "".join(f"[{char.lower()}{char.upper()}]" if char.isalpha() else char for char in name)


def warn_of_unknown(names: tuple[str, ...]) -> None:
    """Say at once which APIs torch does not have: the dump would be empty."""
    for name in names:
        family, _, api = parse_call_name(name).op.partition(".")
        home = _HOMES.get(family)
        if home is not None and not hasattr(home, api):
            logger.warning(
                "scope: %s: torch has no %s.%s.%s", underscored(name), family, api, did_you_mean(api, dir(home))
            )
