"""Every private or recent name of torch that this package uses, in one place, for torch 2.1 and newer.

Each name is declared with the first torch that has it, what is used before that, and what cannot be done without it.
Other files import from here; a test fails when a private name of torch is used anywhere else. Where a name is absent
that nothing can replace, importing this module raises one UnsupportedTorch. `limits` lists what the installed torch
cannot do; the manifest of a run and `tensorprobe doctor` show it.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
import warnings
from collections.abc import Callable, Iterator
from functools import cache, reduce
from importlib import import_module
from typing import Any, NamedTuple

import torch
import torch.multiprocessing.reductions
import torch.overrides
import torch.utils._python_dispatch
import torch.utils.backend_registration
import torch.utils.checkpoint
import torch.utils.data

from tensorprobe.errors import UnsupportedTorch, UntriedTorch

OLDEST, NEWEST = (2, 1), (2, 15)
"""The versions that were tried. A newer one is used with a warning, an older one is refused."""


class Name(NamedTuple):
    """One name of torch: the first version that has it, what is used before, and what is lost without it."""

    path: str
    since: str
    before: str = ""
    lost: str = ""
    found: bool = True


NAMES: list[Name] = []
"""What this module looked up, in order."""
_NOTHING = object()


def find(path: str) -> Any:
    """Return the object at a dotted path inside torch, or None where this torch does not have it."""
    try:
        return reduce(getattr, path.split("."), torch)
    except AttributeError:
        return None


def need(path: str, *, since: str = "2.1", before: str = "", lost: str = "", instead: Any = _NOTHING) -> Any:
    """Return a name of torch, or `instead` where it is absent; UnsupportedTorch where nothing can replace it."""
    found = find(path)
    NAMES.append(Name(f"torch.{path}", since, before, lost, found is not None))
    if found is not None:
        return found
    if instead is _NOTHING:
        raise UnsupportedTorch(
            f"torch {torch.__version__} has no torch.{path}, which tensorprobe needs.\n"
            f"  It works with torch {version_text(OLDEST)} to {version_text(NEWEST)}; install one of them."
        )
    return instead


def version_text(version: tuple[int, ...]) -> str:
    """Return a version as people write it."""
    return ".".join(map(str, version))


def torch_version() -> tuple[int, int]:
    """Return the major and minor version of the installed torch."""
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


def limits() -> list[str]:
    """Return what the installed torch cannot do, one sentence each; empty for a torch that has every name."""
    return [
        f"torch {torch.__version__} has no {name.path} (since {name.since}): {name.lost}"
        for name in NAMES
        if name.lost and not name.found
    ]


def check_version(version: tuple[int, int]) -> None:
    """Refuse a torch that is too old; warn of one that is newer than those that were tried."""
    if version < OLDEST:
        raise UnsupportedTorch(
            f"torch {torch.__version__} is too old: tensorprobe works with torch {version_text(OLDEST)} and newer."
        )
    if version > NEWEST:
        warnings.warn(
            f"torch {torch.__version__} is newer than {version_text(NEWEST)}, the newest that tensorprobe was tried with. "
            "It goes on; `tensorprobe doctor` shows what works.",
            UntriedTorch,
            stacklevel=2,
        )


check_version(torch_version())

# Autograd: which nodes a call made, which backward runs, and its end.
sequence_number: Callable[[], int] = need("autograd._get_sequence_nr")
graph_task: Callable[[], int] = need("_C._current_graph_task_id")
autograd_node: Callable[[], Any] = need("_C._current_autograd_node")
at_end_of_backward: Callable[[Callable[[], None]], None] = need("autograd.Variable._execution_engine").queue_callback
top_saved_tensor_hooks: Callable[[bool], Any] | None = need(
    "_C._autograd._top_saved_tensors_default_hooks",
    since="2.8",
    before="hooks that do nothing are installed around a call that runs again, whether or not the program has any",
    instead=None,
)

# Modes: what sees a call, and how the tool hides its own calls.
no_overrides: Callable[[], Any] = need("_C.DisableTorchFunction")
push_function_mode: Callable[[Any], None] = need("_C._push_on_torch_function_stack")
pop_function_mode: Callable[[], Any] = need("_C._pop_torch_function_stack")
function_modes: Callable[[], int] = need("_C._len_torch_function_stack")
push_dispatch_mode: Callable[[Any], None] = need("_C._push_on_torch_dispatch_stack")
pop_dispatch_mode: Callable[[], Any] = need("utils._python_dispatch._pop_mode")
dispatch_modes: Callable[[], int] = need("_C._len_torch_dispatch_stack")
DispatchMode: Any = need("utils._python_dispatch.TorchDispatchMode")
no_modes: Callable[[], Any] = need("utils._python_dispatch._disable_current_modes")
below_autograd: Callable[[], Any] = need("_C._AutoDispatchBelowAutograd")
no_autocast: Callable[[], Any] = need("_C._DisableAutocast")
is_tracing: Callable[[], bool] = need("_C._is_tracing")
_is_compiling: Callable[[], bool] = need(
    "compiler.is_compiling",
    since="2.3",
    before="torch._utils.is_compiling",
    instead=find("_utils.is_compiling"),
)


frame_evaluation: Any = need("_C._dynamo.eval_frame")
_set_frame_callback: Callable[[Any], Any] = frame_evaluation.set_eval_frame
COMPILES_THROUGH = torch_version() >= (2, 11)
"""Whether torch.compile traces through our modes and wrappers. An older one raises, or compiles again for each call."""


def frame_callback_setters() -> list[Any]:
    """Return the modules that hold `set_eval_frame`, which each compiled function calls first and last."""
    found = [frame_evaluation, sys.modules.get("torch._dynamo.eval_frame")]
    return [module for module in found if hasattr(module, "set_eval_frame")]


def not_compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function, after telling a torch.compile that cannot trace through it to run its frames as they are."""
    if hasattr(frame_evaluation, "skip_code"):  # until 2.6
        frame_evaluation.skip_code(function.__code__)
    elif not COMPILES_THROUGH:
        skip, default = frame_evaluation._FrameAction.SKIP, frame_evaluation._FrameAction.DEFAULT
        strategy = frame_evaluation._FrameExecStrategy(skip, default)
        frame_evaluation.set_code_exec_strategy(function.__code__, strategy)
    return function


_compile_context: Callable[[], Any] = need(
    "_guards.CompileContext.try_get",
    since="2.2",
    before="torch._guards.CompileContext.get",
    instead=find("_guards.CompileContext.get"),
)


def is_being_compiled() -> bool:
    """Return whether this code runs as a part of compiling, and not of compiled code."""
    return _compile_context() is not None


@not_compiled
def _is_compiling_here() -> bool:
    """Return whether torch.compile traces this code, or runs the frames around a region that it compiles."""
    if _is_compiling():
        return True
    callback = _set_frame_callback(None)
    _set_frame_callback(callback)
    return callback is not None


is_compiling: Callable[[], bool] = _is_compiling if COMPILES_THROUGH else _is_compiling_here
CheckpointFrame: Any = need("utils.checkpoint._CheckpointFrame")
LoaderIterator: Any = need("utils.data.dataloader._BaseDataLoaderIter")
NAMES.append(
    Name(
        "torch.distributed.device_mesh",
        "2.2",
        lost="the manifest of a rank holds no coordinates in a device mesh",
        found=torch_version() >= (2, 2),
    )
)


def _shows_collectives() -> bool:
    broadcast = getattr(sys.modules.get("torch.distributed"), "broadcast", None)
    return broadcast is None or "has_torch_function" in inspect.unwrap(broadcast).__code__.co_names


NAMES.append(
    Name(
        "torch function overrides of torch.distributed",
        "2.13",
        lost="level api does not record all collectives; before 2.8 it records none",
        found=_shows_collectives(),
    )
)


def current_mesh() -> Any:
    """Return the device mesh of an enclosing `with mesh:`; None where there is none, and before torch 2.2."""
    resources = getattr(sys.modules.get("torch.distributed.device_mesh"), "_mesh_resources", None)
    return None if resources is None else resources.get_current_mesh()


# Tensors: where their bytes are, and what kind they are.
address_of: Callable[[torch.Tensor], int] = need(
    "Tensor.const_data_ptr",
    since="2.13",
    before="Tensor.data_ptr, which makes the copy of a tensor of torch._lazy_clone",
    instead=torch.Tensor.data_ptr,
)
is_functional_tensor: Callable[[torch.Tensor], bool] = need("_is_functional_tensor")
is_wrapper_class: Callable[[type], bool] = need(
    "utils._python_dispatch.is_traceable_wrapper_subclass_type",
    since="2.5",
    before="whether the class has __tensor_flatten__ and __tensor_unflatten__",
    instead=lambda cls: hasattr(cls, "__tensor_flatten__") and hasattr(cls, "__tensor_unflatten__"),
)

# Functions: where torch keeps its kernels.
OpOverload: Any = need("_ops.OpOverload")
OpOverloadPacket: Any = need("_ops.OpOverloadPacket")
schemas_of_op: Callable[[str], list[Any]] = need("_C._jit_get_schemas_for_operator")
functions_of_aten: Any = need("_C._VariableFunctions")
functions_of_nn: Any = need("_C._nn")
methods_of_tensor: Any = need(
    "_C.TensorBase", since="2.2", before="torch._C._TensorBase", instead=find("_C._TensorBase")
)
recurrent_functions: Any = need("_VF")
all_op_names: Callable[[], list[str]] = need("_C._dispatch_get_all_op_names")
extra_device: Callable[[], str] = need("_C._get_privateuse1_backend_name")


@cache
def overridable_functions() -> dict[Any, list[Any]]:
    """Return the functions that torch offers to overrides, by namespace. Before 2.4 listing them warns of deprecated names."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return dict(torch.overrides.get_overridable_functions())


def resolve_name(function: Any) -> str | None:
    """Return the dotted name that torch has for one of its functions."""
    overridable_functions()
    found: str | None = torch.overrides.resolve_name(function)
    return found


def accelerators() -> dict[str, Any]:
    """Return the module of each kind of accelerator that is present: torch.cuda, torch.npu, torch.xpu, torch.mps."""
    found = {}
    for kind in ("cuda", "xpu", "mps", "mtia", extra_device()):
        module = getattr(torch, kind, None)
        # torch.mps has the question since 2.2
        ask = getattr(module, "is_available", None) or find(f"backends.{kind}.is_available")
        if module is not None and ask is not None and ask():
            found[kind] = module
    return found


device_module: Callable[[Any], Any] = need(
    "get_device_module",
    since="2.4",
    before="the module of torch called like the device",
    instead=lambda device: getattr(torch, torch.device(device).type),
)
GradScaler: Any = need(
    "amp.GradScaler", since="2.3", before="torch.cuda.amp.GradScaler", instead=find("cuda.amp.GradScaler")
)
_get_autocast_dtype: Any = need(
    "get_autocast_dtype",
    since="2.4",
    before="functions for each device: torch.is_autocast_enabled (CUDA), is_autocast_cpu_enabled and so on",
    instead=None,
)


def is_autocast_on(device_type: str) -> bool:
    """Return whether autocast is on for a kind of device."""
    if _get_autocast_dtype is not None:
        return bool(torch.is_autocast_enabled(device_type))
    ask = find(f"is_autocast_{_older_autocast(device_type)}enabled")
    return bool(ask is not None and ask())


def set_autocast(device_type: str, on: bool) -> None:
    """Turn autocast on or off for a kind of device."""
    if _get_autocast_dtype is not None:
        torch.set_autocast_enabled(device_type, on)
    else:
        find(f"set_autocast_{_older_autocast(device_type)}enabled")(on)


def _older_autocast(device_type: str) -> str:
    """Return the middle of the names that torch 2.1 to 2.3 have for a kind of device."""
    return {"cuda": "", extra_device(): "privateuseone_"}.get(device_type, f"{device_type}_")


def decompositions() -> dict[Any, Callable[..., Any]]:
    """Return torch's decompositions, by op."""
    return dict(import_module("torch._decomp").decomposition_table)


# The simulated device: keys of the dispatcher, and what registers a device that is written in Python.
DispatchKey: Any = need("_C.DispatchKey")
DispatchKeySet: Any = need("_C.DispatchKeySet")
TensorType: Any = need("_C.TensorType")
DeviceType: Any = need("_C._autograd.DeviceType")
without_keys: Callable[[Any], Any] = need("_C._ExcludeDispatchKeyGuard")
has_kernel: Callable[[str, str], bool] = need("_C._dispatch_has_kernel_for_dispatch_key")
takes_numbers: Callable[[str], bool] = need("_C._should_allow_numbers_as_tensors")
to_dlpack: Callable[[torch.Tensor], Any] = need("_C._to_dlpack")
from_dlpack: Callable[[Any], torch.Tensor] = need("_C._from_dlpack")
SIMULATED_SINCE = "2.10"
accelerator_parts: Any = need("_C._acc", since=SIMULATED_SINCE, before="nothing: sim.enable refuses", instead=None)
setup_python_backend: Any = need(
    "utils.backend_registration._setup_privateuseone_for_python_backend",
    since=SIMULATED_SINCE,
    before="nothing: sim.enable refuses",
    instead=None,
)


StorageWeakRef: Any = need("multiprocessing.reductions.StorageWeakRef")


def storage_key(tensor: torch.Tensor) -> int:
    """Return the identity of a tensor's storage, of the local part where it is distributed. RuntimeError when it has none."""
    tensor = getattr(tensor, "_local_tensor", tensor)
    return int(getattr(tensor, "elem", tensor).untyped_storage()._cdata)


def replace_engine_entry(wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Wrap the function through which every backward enters the autograd engine (torch 2.2 and newer)."""
    wrapped = wrap(torch.autograd.graph._engine_run_backward)
    torch.autograd.graph._engine_run_backward = torch.autograd._engine_run_backward = wrapped


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Inside, torch calls are seen by no mode and leave no trace in any graph."""
    with no_overrides(), torch.no_grad():
        if dispatch_modes():
            with no_modes():
                yield
        else:
            yield


@contextlib.contextmanager
def replacing_saved(replace: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
    """What calls inside keep for their backward goes through `replace` when that backward uses it."""
    with torch.autograd.graph.saved_tensors_hooks(torch.Tensor.detach, replace):
        yield
