"""`mode="acl"`: what the kernels inside one API call are given and give back.

On an NPU torch_npu writes the dump: it is switched on directly before the call and off directly after it. On every other
device the ATen calls inside the API call are recorded, into the same folders: `{dump_path}/{time}/{deviceid}/{model_id}/`.
The settings come from a dump.json, of which every field is checked before training begins.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import torch

from tensorprobe.errors import SettingsError, UnknownSetting, did_you_mean
from tensorprobe.files import read_settings
from tensorprobe.legacy.layouts.dump_sink import DumpSink, dump_kernels
from tensorprobe.legacy.layouts.targets import KernelTarget
from tensorprobe.legacy.ptdbg import logger
from tensorprobe.legacy.wrapped import RULES
from tensorprobe.model import Call, Coverage
from tensorprobe.model.call import forward_name
from tensorprobe.model.sink import Alone, Needs
from tensorprobe.ops.names import underscored
from tensorprobe.record.run_sink import RunSink
from tensorprobe.replay.arguments import Rebuilding, rebuild_call
from tensorprobe.replay.functions import find_function
from tensorprobe.replay.once import stay_on_host
from tensorprobe.taps import Probe
from tensorprobe.taps.ranks import main_device

_MODES = {"output": ("output",), "input": ("input",), "all": ("input", "output")}
_SWITCHES = ("on", "off")
_FIELDS = ("dump_list", "dump_path", "dump_mode", "dump_op_switch")
_MODEL_ID = "0"
_EXAMPLE = '{"dump": {"dump_list": [], "dump_path": "./output", "dump_mode": "all", "dump_op_switch": "on"}}'

GradientPaths = list[Path]
"""Where the gradients are; `set_backward_input` may fill it after the dump has begun."""


class DumpConfig(NamedTuple):
    """A dump.json that was found to be in order."""

    file: Path
    dump_path: Path
    dump_mode: str
    dump_list: tuple[Any, ...]


def read_dump_config(path: str | os.PathLike[str]) -> DumpConfig:
    """Read and check a dump.json. SettingsError says which field is wrong, and what it may be."""
    if not isinstance(path, (str, os.PathLike)):
        raise SettingsError(f"dump_config takes the path of a dump.json; got {path!r}.")
    file = Path(path).absolute()
    fields = _read_fields(file)
    for key in fields:
        if key not in _FIELDS:
            raise UnknownSetting(
                f"{key!r} in '{file}' is not known.{did_you_mean(key, _FIELDS)} Fields: {', '.join(_FIELDS)}."
            )
    dump_list = fields.get("dump_list", [])
    if not isinstance(dump_list, list):
        raise SettingsError(f"dump_list in '{file}' is {dump_list!r}; it must be a list, usually an empty one: [].")
    dump_path = fields.get("dump_path")
    if not isinstance(dump_path, str) or not dump_path or "\0" in dump_path:
        said = "is missing" if "dump_path" not in fields else f"is {dump_path!r}"
        raise SettingsError(f"dump_path in '{file}' {said}; it must be the folder for the dump, such as \"./output\".")
    folder = Path(dump_path).absolute()
    if folder.exists() and not folder.is_dir():
        raise SettingsError(f"dump_path in '{file}' is '{folder}', which is a file; it must be a folder.")
    dump_mode = _choice(file, fields, "dump_mode", tuple(_MODES), "output")
    if _choice(file, fields, "dump_op_switch", _SWITCHES, "off") == "off":
        said = "is 'off'" if "dump_op_switch" in fields else "is missing, which means off"
        raise SettingsError(f"dump_op_switch in '{file}' {said}: nothing would be dumped. Set it to \"on\".")
    return DumpConfig(file, folder, dump_mode, tuple(dump_list))


def _read_fields(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(read_settings(file).decode("utf-8-sig"))
    except OSError as error:
        raise SettingsError(
            f"dump_config '{file}' cannot be read: {error.strerror}. It is a file such as\n  {_EXAMPLE}"
        ) from None
    except (ValueError, RecursionError) as error:
        raise SettingsError(f"dump_config '{file}' is not JSON: {error}. It must be such as\n  {_EXAMPLE}") from None
    for key in content if isinstance(content, dict) else ():
        if key != "dump":
            hint = did_you_mean(key, ["dump"])
            raise UnknownSetting(f"{key!r} in '{file}' is not known.{hint} The file holds one object, \"dump\".")
    fields = content.get("dump") if isinstance(content, dict) else None
    if not isinstance(fields, dict):
        raise SettingsError(f"dump_config '{file}' has no object \"dump\". It must be such as\n  {_EXAMPLE}")
    return fields


def _choice(file: Path, fields: dict[str, Any], key: str, allowed: Sequence[str], default: str) -> str:
    value = fields.get(key, default)
    if value not in allowed:
        hint = did_you_mean(str(value), allowed)
        raise SettingsError(f"{key} in '{file}' is {value!r}; it must be one of {', '.join(allowed)}.{hint}")
    return str(value)


def load_gradients(paths: Sequence[str | os.PathLike[str]]) -> list[numpy.ndarray[Any, Any]]:
    """The arrays of .npy files. SettingsError for what is none."""
    arrays = []
    for path in paths:
        try:
            array = numpy.load(path, mmap_mode="c", allow_pickle=False)
        except (OSError, ValueError, EOFError) as error:
            raise SettingsError(f"set_backward_input: '{path}' is not a .npy file that can be read: {error}") from None
        if not isinstance(array, numpy.ndarray) or array.dtype.kind not in "fciub":
            raise SettingsError(f"set_backward_input: '{path}' does not hold an array of numbers.")
        arrays.append(array)
    return arrays


def device_is_npu(model: Any) -> bool:
    """Whether the model is on an NPU, and torch_npu is there to dump it."""
    present = "torch_npu" in sys.modules or importlib.util.find_spec("torch_npu") is not None
    return present and main_device(model).partition(":")[0] == "npu"


def warn_of_queue() -> None:
    """Say what hinders a dump by torch_npu."""
    if os.environ.get("TASK_QUEUE_ENABLE") != "0":
        logger.warning(
            "TASK_QUEUE_ENABLE is not 0: kernels run later than they are called, and the dump may miss them or hold "
            "others. Before the program: export TASK_QUEUE_ENABLE=0"
        )


class AclDump:
    """One dump of one call, from "ON" to "OFF". `out` is where its files are; `is_foreign`: torch_npu writes them."""

    def __init__(
        self, model: Any, name: str, config: str | os.PathLike[str] | None, gradients: GradientPaths, *, rank: int = 0
    ) -> None:
        if config is None:
            raise SettingsError(
                'mode "acl" needs a dump.json: register_hook(model, acc_cmp_dump, dump_mode="acl", dump_config="dump.json")'
            )
        self._config = read_dump_config(config)
        self._name = name
        self._paths = gradients
        self._gradients_used = False
        self._on_npu = self.is_foreign = device_is_npu(model)
        self._scratch: tempfile.TemporaryDirectory[str] | None = None
        if self._on_npu:
            self.out = self._config.dump_path
            self._probe = self._bracket(model, rank)
        else:
            self.out = _new_folder(self._config, main_device(model), rank)
            self._probe = self._record(model, rank)

    def start(self) -> AclDump:
        """Wait for the call."""
        try:
            self._probe.start()
        except BaseException:
            self._clean()
            raise
        return self

    def stop(self) -> Coverage | None:
        """End the dump. What was not found is told, with the nearest names that were."""
        try:
            coverage = self._probe.stop()
        finally:
            self._clean()
        if coverage is not None and not coverage.unmatched and forward_name(self._name):
            self._warn_of_gradients()
        return coverage

    def _record(self, model: Any, rank: int) -> Probe:
        """The ATen calls inside the API call, recorded by ourselves."""
        if self._config.dump_list:
            logger.warning("dump_list is for NPUs: on %s every kernel inside the call is dumped.", main_device(model))
        alone = Alone(self._name, gradients=self._gradients, warn=logger.warning)
        return Probe(
            self.out,
            model=model,
            rank=rank,
            sink=DumpSink(self.out, KernelTarget(str(self.out)), needs=Needs(alone=alone, rules=RULES)),
            level="aten",
            inside=(self._name,),
            sides=_MODES[self._config.dump_mode],
            stacks=False,
        )

    def _bracket(self, model: Any, rank: int) -> Probe:
        """torch_npu switched on around the call; our own record of it, which nobody asked for, goes to a scratch folder."""
        warn_of_queue()
        self._scratch = tempfile.TemporaryDirectory(prefix="tensorprobe-")
        alone = Alone(
            self._name,
            gradients=self._gradients,
            enter=partial(_begin_foreign, self._config),
            leave=_end_foreign,
            warn=logger.warning,
        )
        out = Path(self._scratch.name, "run")
        return Probe(
            out,
            model=model,
            rank=rank,
            sink=RunSink(out, needs=Needs(alone=alone, rules=RULES)),
            names=(self._name,),
            mode="structure",
            stacks=False,
            in_process=True,
        )

    def _gradients(self) -> list[numpy.ndarray[Any, Any]] | None:
        self._gradients_used = bool(self._paths)
        return [numpy.array(each) for each in load_gradients(self._paths)] if self._paths else None

    def _warn_of_gradients(self) -> None:
        """A backward on an NPU needs gradients; gradients that came late were not used."""
        if self._paths and not self._gradients_used:
            logger.warning(
                "%s: set_backward_input came after the forward of the call; it had no effect on this dump.",
                underscored(self._name),
            )
        elif not self._paths and self._on_npu:
            logger.warning(
                "%s: nothing was dumped. On an NPU a backward call needs its gradients: "
                'set_backward_input(["….npy"]) after set_dump_switch("ON", …).',
                underscored(self._name),
            )

    def _clean(self) -> None:
        if self._scratch is not None:
            self._scratch.cleanup()


def dump_again(
    call: Call, inputs: Mapping[str, torch.Tensor], config: DumpConfig, *, device: str, rank: int, on_npu: bool
) -> Path:
    """Run a forward call once more, on these copies of its inputs, and dump its kernels; where they are.

    To be called where the call itself was made: autocast is on or off as it was. Random states stay as they are.
    CannotReplay when it cannot be run alone; what the call itself raises is passed on.
    """
    function = find_function(call.op)
    on_host = stay_on_host(call)
    tensors = {name: held.to("cpu" if name in on_host else device) for name, held in inputs.items()}
    args, kwargs = rebuild_call(call, Rebuilding(tensors, device, {}))

    def run() -> None:
        kind, _, index = device.partition(":")
        with torch.no_grad(), torch.random.fork_rng([int(index or 0)] if kind != "cpu" else [], device_type=kind):
            function(*args, **kwargs)

    if not on_npu:
        folder = _new_folder(config, device, rank)
        dump_kernels(run, folder, sides=_MODES[config.dump_mode], rank=rank)
        return folder
    _begin_foreign(config)
    try:
        run()
    finally:
        _end_foreign()
    return config.dump_path


def _new_folder(config: DumpConfig, device: str, rank: int) -> Path:
    _, _, index = device.partition(":")
    return new_folder(lambda moment: config.dump_path / f"{moment:%Y%m%d%H%M%S}" / (index or str(rank)) / _MODEL_ID)


def new_folder(place: Callable[[datetime], Path]) -> Path:
    """A folder that is not there yet: what two programs write in the same second is not mixed."""
    moment = datetime.now()
    while True:
        folder = place(moment)
        try:
            folder.mkdir(parents=True)  # whoever makes it owns it
        except FileExistsError:
            moment += timedelta(seconds=1)
        else:
            return folder


def _begin_foreign(config: DumpConfig) -> None:
    """torch_npu dumps from here on."""
    import torch_npu

    torch_npu.npu.init_dump()
    torch_npu.npu.set_dump(str(config.file))
    _synchronize()


def _end_foreign() -> None:
    import torch_npu

    _synchronize()
    torch_npu.npu.finalize_dump()


def _synchronize() -> None:
    """Wait for the device, where it can be waited for."""
    synchronize = getattr(getattr(torch, "npu", None), "synchronize", None)
    if synchronize is not None:
        synchronize()


def begin(
    model: Any, name: str, config: str | os.PathLike[str] | None, gradients: GradientPaths, *, rank: int = 0
) -> AclDump:
    """Begin the dump of the call with this canonical name."""
    return AclDump(model, name, config, gradients, rank=rank).start()
