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
import weakref
from collections.abc import Callable, Iterator
from functools import cache, reduce
from importlib import import_module
from operator import or_
from types import CodeType, FunctionType
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
    """One name of torch: the first version that has it, what is used before, and what is lost without it, or with it."""

    path: str
    since: str
    before: str = ""
    lost: str = ""
    found: bool = True
    lost_with: str = ""


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


def behaves(what: str, since: str, before: str = "", lost: str = "", lost_with: str = "") -> bool:
    """Declare something that names cannot show; return whether the installed torch is new enough."""
    found = torch_version() >= tuple(map(int, since.split(".")))
    NAMES.append(Name(what, since, before, lost, found, lost_with))
    return found


def version_text(version: tuple[int, ...]) -> str:
    """Return a version as people write it."""
    return ".".join(map(str, version))


def torch_version() -> tuple[int, int]:
    """Return the major and minor version of the installed torch."""
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


def limits() -> list[str]:
    """Return what capture cannot do with the installed torch, one sentence each."""
    return [
        f"{lost} (torch {name.since} and newer have {name.path}; this is {torch.__version__})"
        for name in NAMES
        if (lost := name.lost_with if name.found else name.lost)
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
no_overrides_of_classes: Callable[[], Any] = need("_C.DisableTorchFunctionSubclass")
no_override: Callable[..., Any] = need("_C._disabled_torch_function_impl")
push_function_mode: Callable[[Any], None] = need("_C._push_on_torch_function_stack")
pop_function_mode: Callable[[], Any] = need("_C._pop_torch_function_stack")
function_modes: Callable[[], int] = need("_C._len_torch_function_stack")
push_dispatch_mode: Callable[[Any], None] = need("_C._push_on_torch_dispatch_stack")
pop_dispatch_mode: Callable[[], Any] = need("utils._python_dispatch._pop_mode")
dispatch_modes: Callable[[], int] = need("_C._len_torch_dispatch_stack")
DispatchMode: Any = need("utils._python_dispatch.TorchDispatchMode")
no_modes: Callable[[], Any] = need("utils._python_dispatch._disable_current_modes")
_is_excluded: Callable[[Any], bool] = need("_C._dispatch_tls_is_dispatch_key_excluded")
_set_excluded: Callable[[Any, bool], None] = need("_C._dispatch_tls_set_dispatch_key_excluded")
below_autograd: Callable[[], Any] = need("_C._AutoDispatchBelowAutograd")
no_autocast: Callable[[], Any] = need("_C._DisableAutocast")
is_tracing: Callable[[], bool] = need("_C._is_tracing")
_is_compiling: Callable[[], bool] = need(
    "compiler.is_compiling", since="2.3", before="torch._utils.is_compiling", instead=find("_utils.is_compiling")
)

frame_evaluation: Any = need("_C._dynamo.eval_frame")
_set_frame_callback: Callable[[Any], Any] = frame_evaluation.set_eval_frame
COMPILES_THROUGH = behaves(
    "torch.compile that traces through modes",
    "2.13",
    "no mode is on while compiled code runs",
    "nothing is recorded while code compiled by torch.compile runs; it is counted as a blind spot",
)
"""Whether torch.compile traces through our modes and wrappers. An older one raises, or compiles again for each call."""


def frame_callback_setters() -> list[tuple[Any, str]]:
    """Return where `set_eval_frame` stands, which each compiled function calls first and last: modules and names."""
    modules = [frame_evaluation, sys.modules.get("torch._dynamo.eval_frame")]
    places = [(module, name) for module in modules for name in ("set_eval_frame", "_maybe_set_eval_frame")]
    return [place for place in places if getattr(getattr(*place, None), "__name__", "") == "set_eval_frame"]


def run_as_is(code: CodeType, action: str = "SKIP") -> None:
    """Tell torch.compile to run frames of this code as they are, unless it traces them as a part of others."""
    if hasattr(frame_evaluation, "skip_code"):  # until 2.6
        frame_evaluation.skip_code(code)
    else:
        actions = frame_evaluation._FrameAction
        strategy = frame_evaluation._FrameExecStrategy(getattr(actions, action), actions.DEFAULT)
        frame_evaluation.set_code_exec_strategy(code, strategy)


def not_compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that torch.compile traces through where it can. Otherwise its frames run as they are."""
    run_as_is(function.__code__, "DEFAULT" if COMPILES_THROUGH else "SKIP")
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
    """Return whether torch.compile traces this code, runs the frames around a region that it compiles, or is imported."""
    if _is_compiling():
        return True
    callback = _set_frame_callback(None)
    _set_frame_callback(callback)
    return callback is not None or _is_importing_compiler()


def _is_importing_compiler() -> bool:
    """Return whether this thread imports torch._dynamo, as the first optimizer does. In some versions that calls torch."""
    spec = getattr(sys.modules.get("torch._dynamo"), "__spec__", None)
    frame = sys._getframe(1) if getattr(spec, "_initializing", False) else None
    while frame is not None and frame.f_globals.get("__spec__") is not spec:
        frame = frame.f_back
    return frame is not None


is_compiling: Callable[[], bool] = _is_compiling if COMPILES_THROUGH else _is_compiling_here
_optimizers = import_module("torch.optim.optimizer")
hooks_of_all_optimizers = (_optimizers._global_optimizer_pre_hooks, _optimizers._global_optimizer_post_hooks)
CheckpointFrame: Any = need("utils.checkpoint._CheckpointFrame")
LoaderIterator: Any = need("utils.data.dataloader._BaseDataLoaderIter")
behaves("torch.distributed.device_mesh", "2.2", "torch.distributed._tensor.device_mesh")
COLLECTIVES = (
    "all_gather all_gather_coalesced all_gather_into_tensor all_reduce all_reduce_coalesced all_to_all all_to_all_single "
    "broadcast gather irecv isend recv reduce reduce_scatter reduce_scatter_tensor scatter send"
).split()
"""The functions of torch.distributed that a function mode is to see. torch shows all of them since 2.13, some since 2.8."""
behaves("torch function overrides of torch.distributed", "2.13", "their bodies are replaced while a probe runs")


def hidden_collectives() -> Iterator[tuple[str, FunctionType]]:
    """Yield the collectives that this torch does not show to a function mode: name, and function without decorators."""
    for name in COLLECTIVES if torch_version() < (2, 13) and torch.distributed.is_available() else ():
        function = inspect.unwrap(getattr(torch.distributed, name))
        if isinstance(function, FunctionType) and "has_torch_function" not in function.__code__.co_names:
            yield name, function


SHOWS_SUBSCRIPTS = behaves(
    "torch function overrides of Tensor.__getitem__ and __setitem__",
    "2.2",
    "Tensor has methods of ours while a probe runs",
)
DETACHES_ONCE = behaves("torch.Tensor.detach, seen once by dispatch modes", "2.10", "the second is not recorded")
APPLIES_IN_C = behaves(
    "torch.autograd.Function.apply written in C",
    "2.14",
    "the same of its base class is replaced while a probe runs",
    lost_with="of an autograd.Function whose apply was taken before capture began, only the calls inside are seen",
)
are_functorch_transforms_active: Callable[[], bool] = need("_C._are_functorch_transforms_active")


def keep_backends_of_groups() -> None:
    """Let each process group end without a deadlock, before torch 2.13.

    torch joins the threads of a group while it holds the interpreter's lock, and a thread may wait for that lock to release
    a work that was made under a mode. The backend as a Python object is destroyed without the lock: it has to go last.
    """
    world = getattr(sys.modules.get("torch.distributed.distributed_c10d"), "_world", None)
    held = [] if world is None or torch_version() >= (2, 13) else [*world.pg_map]
    for group in (group for group in held if group not in _groups):
        _groups.add(group)
        backends = [group._get_backend(device) for device in group._device_types]
        weakref.finalize(group, backends.clear).atexit = False


_groups: weakref.WeakSet[Any] = weakref.WeakSet()


def current_mesh() -> Any:
    """Return the device mesh of an enclosing `with mesh:`; None where the program has no meshes. RuntimeError outside."""
    for module, name in (("device_mesh", "_mesh_resources"), ("_tensor.device_mesh", "mesh_resources")):
        resources = getattr(sys.modules.get(f"torch.distributed.{module}"), name, None)
        if resources is not None:
            return resources.get_current_mesh()
    return None


# Tensors: where their bytes are, and what kind they are.
address_of: Callable[[torch.Tensor], int] = need(
    "Tensor.const_data_ptr",
    since="2.13",
    before="Tensor.data_ptr, which makes the copy of a tensor of torch._lazy_clone",
    instead=torch.Tensor.data_ptr,
)
innermost_transform: Callable[[], Any] = need("_C._functorch.peek_interpreter_stack")
is_functional_tensor: Callable[[torch.Tensor], bool] = need("_is_functional_tensor")
PLAIN_CLASSES = frozenset((torch.Tensor, torch.nn.Parameter))
is_wrapper_class: Callable[[type], bool] = need(
    "utils._python_dispatch.is_traceable_wrapper_subclass_type",
    since="2.5",
    before="whether the class has __tensor_flatten__ and __tensor_unflatten__",
    instead=lambda cls: hasattr(cls, "__tensor_flatten__") and hasattr(cls, "__tensor_unflatten__"),
)


def _copy_generator(generator: torch.Generator) -> torch.Generator:
    return torch.Generator(generator.device).set_state(generator.get_state())


clone_generator: Callable[[torch.Generator], torch.Generator] = need(
    "Generator.clone_state", since="2.4", before="a new generator in the same state", instead=_copy_generator
)

# Functions: where torch keeps its kernels.
OpOverload: Any = need("_ops.OpOverload")
OpOverloadPacket: Any = need("_ops.OpOverloadPacket")
HigherOrderOperator: Any = need("_ops.HigherOrderOperator")
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
    """Return the dotted name that torch has for one of its functions. No filter of warnings is set: Python forgets by it."""
    overridable_functions()
    return inspect.unwrap(torch.overrides.resolve_name)(function)  # type: ignore[no-any-return]


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
    before="a function for each device: torch.is_autocast_cpu_enabled …",
    instead=None,
)


def is_autocast_on(device_type: str) -> bool:
    """Return whether autocast is on for a kind of device."""
    if _get_autocast_dtype is not None:
        return bool(torch.is_autocast_enabled(device_type))
    return bool((find(f"is_autocast_{_older_autocast(device_type)}enabled") or bool)())


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
behaves(
    "torch.compile that keeps the hooks of optimizers",
    "2.3",
    lost="steps of an optimizer are not seen once torch.compile has compiled something: call probe.step()",
)
accelerator_parts: Any = need("_C._acc", since=SIMULATED_SINCE, before="nothing: sim.enable refuses", instead=None)
setup_python_backend: Any = need(
    "utils.backend_registration._setup_privateuseone_for_python_backend",
    since=SIMULATED_SINCE,
    before="nothing: sim.enable refuses",
    instead=None,
)
exchange_api: Any = need("_C._dlpack_exchange_api", since="2.10", before="C copies, Python records", instead=None)
is_lazy_clone: Any = need("_C._is_cow_tensor", since="2.3", before="no lazy clones", instead=None)
StorageWeakRef: Any = need("multiprocessing.reductions.StorageWeakRef")

# What a tensor is, past any property, method or __getattribute__ of its class. Call them with overrides off.
requires_grad_of: Callable[[torch.Tensor], bool] = methods_of_tensor.requires_grad.__get__
node_of: Callable[[torch.Tensor], Any] = methods_of_tensor.grad_fn.__get__
output_number_of: Callable[[torch.Tensor], int] = methods_of_tensor.output_nr.__get__
base_of: Callable[[torch.Tensor], Any] = methods_of_tensor._base.__get__
is_view: Callable[[torch.Tensor], bool] = methods_of_tensor._is_view
_version_of: Callable[[torch.Tensor], int] = methods_of_tensor._version.__get__
dtype_of: Callable[[torch.Tensor], torch.dtype] = methods_of_tensor.dtype.__get__
device_of: Callable[[torch.Tensor], torch.device] = methods_of_tensor.device.__get__
shape_of: Callable[[torch.Tensor], torch.Size] = methods_of_tensor.shape.__get__
layout_of: Callable[[torch.Tensor], torch.layout] = methods_of_tensor.layout.__get__
is_nested: Callable[[torch.Tensor], bool] = methods_of_tensor.is_nested.__get__


def version_of(tensor: torch.Tensor) -> int:
    """Return the version of a tensor; -1 for one made in inference mode, which has none."""
    return -1 if methods_of_tensor.is_inference(tensor) else _version_of(tensor)


def overrides_calls(value: Any) -> bool:
    """Return whether the class of a value takes over the calls that it is an argument of."""
    kind = type(value)
    return kind not in PLAIN_CLASSES and getattr(kind, "__torch_function__", no_override) is not no_override


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return the local part of a distributed tensor, the tensor that a functional collective fills, or the tensor itself."""
    for name in ("_local_tensor", "elem"):
        if type(tensor) not in PLAIN_CLASSES and hasattr(type(tensor), name):
            tensor = getattr(tensor, name)
    return tensor


def storage_key(tensor: torch.Tensor) -> int:
    """Return the identity of a tensor's storage, of the local part where it is distributed. RuntimeError when it has none."""
    return int(methods_of_tensor.untyped_storage(local_part(tensor))._cdata)


MODES_PASS_SUBCLASSES = behaves(
    "torch.Tensor.as_subclass under a dispatch mode",
    "2.6",
    "at level aten Tensor has a method of ours while a probe runs, which takes our mode aside",
)


def replace_engine_entry(wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Wrap the function through which every backward enters the autograd engine (torch 2.2 and newer)."""
    torch.autograd._engine_run_backward = wrap(torch.autograd.graph._engine_run_backward)
    torch.autograd.graph._engine_run_backward = torch.autograd._engine_run_backward


need("_C.DispatchKey.AutogradNestedTensor", since="2.2", before="autograd sees ours on nested tensors", instead=None)
_QUIET_KEYS = ("Python", "PythonTLSSnapshot", "AutogradFunctionality", "AutogradOther", "AutogradNestedTensor")
_QUIET = reduce(or_, (DispatchKeySet(getattr(DispatchKey, key)) for key in _QUIET_KEYS if hasattr(DispatchKey, key)))


def quiet() -> Any:
    """Return a context: inside, torch calls are seen by no dispatch mode and leave no trace in any graph."""
    # Written in C, as `no_overrides`: one in Python can be left on, when a signal's handler raises as `__exit__` begins.
    return without_keys(_QUIET)


@contextlib.contextmanager
def heard() -> Iterator[None]:
    """Inside, dispatch modes see calls again: for a call that the tool makes to watch it, where it is `quiet` otherwise."""
    hidden = [key for key in (DispatchKey.Python, DispatchKey.PythonTLSSnapshot) if _is_excluded(key)]
    for key in hidden:
        _set_excluded(key, False)
    try:
        yield
    finally:
        for key in hidden:
            _set_excluded(key, True)


@contextlib.contextmanager
def replacing_saved(replace: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
    """What calls inside keep for their backward goes through `replace` when that backward uses it."""
    with torch.autograd.graph.saved_tensors_hooks(torch.Tensor.detach, replace):
        yield
