"""The private names of torch that capture stands on, looked up once, with one clear error where one is absent."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any

import torch

from tensorprobe.errors import UnsupportedTorch


def need(path: str) -> Any:
    """A name inside torch; UnsupportedTorch where it is absent."""
    try:
        return reduce(getattr, path.split("."), torch)
    except AttributeError:
        raise UnsupportedTorch(
            f"torch {torch.__version__} has no torch.{path}, which capture needs.\n"
            "  This version of tensorprobe is tested with torch 2.13; install one of the two to match."
        ) from None


sequence_number: Callable[[], int] = need("autograd._get_sequence_nr")
graph_task: Callable[[], int] = need("_C._current_graph_task_id")
autograd_node: Callable[[], Any] = need("_C._current_autograd_node")
at_end_of_backward: Callable[[Callable[[], None]], None] = need("autograd.Variable._execution_engine").queue_callback
no_overrides: Callable[[], Any] = need("_C.DisableTorchFunction")
push_function_mode: Callable[[Any], None] = need("_C._push_on_torch_function_stack")
pop_function_mode: Callable[[], Any] = need("_C._pop_torch_function_stack")
function_modes: Callable[[], int] = need("_C._len_torch_function_stack")
push_dispatch_mode: Callable[[Any], None] = need("_C._push_on_torch_dispatch_stack")
_pop_dispatch: Callable[[Any], Any] = need("_C._pop_torch_dispatch_stack")
dispatch_modes: Callable[[], int] = need("_C._len_torch_dispatch_stack")
is_compiling: Callable[[], bool] = need("compiler.is_compiling")
is_tracing: Callable[[], bool] = need("_C._is_tracing")
functions_of_aten: Any = need("_C._VariableFunctions")
functions_of_nn: Any = need("_C._nn")
methods_of_tensor: Any = need("_C.TensorBase")
OpOverload: Any = need("_ops.OpOverload")
OpOverloadPacket: Any = need("_ops.OpOverloadPacket")
schemas_of_op: Callable[[str], list[Any]] = need("_C._jit_get_schemas_for_operator")


def pop_dispatch_mode() -> Any:
    """Take the topmost dispatch mode off this thread's stack."""
    return _pop_dispatch(None)
