"""Calls a function of torch for the program, so that Python takes the program's line for the caller.

A warning names the line that called the function which warns, and Python counts and filters warnings by the module and the
line. The function is therefore called from a frame that has the file, the line and the globals of the program's own call.
"""

from __future__ import annotations

from collections.abc import Callable
from types import CodeType, FrameType, FunctionType
from typing import Any

import torch

from tensorprobe import torch_names

_NAME = "<tensorprobe>"
_MOST_SITES = 100_000
_sites: dict[tuple[int, int], tuple[CodeType, FunctionType]] = {}
_call: FunctionType = lambda func, args, kwargs: func(*args) if kwargs is None else func(*args, **kwargs)  # type: ignore[assignment] # noqa: E731
_handle = torch.overrides.handle_torch_function.__code__


def call_at(frame: FrameType, func: Any, args: Any, kwargs: Any) -> Any:
    """Call a function as if from the line of this frame, which called a mode. The frame has one line in a traceback.

    A Python function of torch has asked `handle_torch_function` to call it. Then the line is that of its own caller.
    """
    if frame.f_code is _handle and frame.f_back is not None and frame.f_back.f_back is not None:
        frame = frame.f_back.f_back
    key = id(frame.f_code), frame.f_lasti
    known = _sites.get(key)
    call = known[1] if known is not None and known[1].__globals__ is frame.f_globals else _make(frame)
    try:
        return call(func, args, kwargs)
    except BaseException as error:
        _forget_calls(error)
        raise


def placed(frame: FrameType, func: Any) -> Callable[..., Any]:
    """Return a function that does the same, with the line that called the frame's function above it.

    A warning of a backward hook names the fifth line above: that of the call of `Tensor.backward`.
    """
    if frame.f_code is _handle and frame.f_back is not None and frame.f_back.f_back is not None:
        frame = frame.f_back.f_back
    inner = _make(frame)
    outer = inner if frame.f_back is None else _make(frame.f_back)

    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return outer(inner, (func, args, kwargs), None)
        except BaseException as error:
            _forget_calls(error)
            raise

    return call


def _forget_calls(error: BaseException) -> None:
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None and is_call(trace.tb_next.tb_frame.f_code):
        trace.tb_next = trace.tb_next.tb_next


def _make(frame: FrameType) -> FunctionType:
    code = frame.f_code
    key = id(code), frame.f_lasti
    mine = _call.__code__.replace(co_filename=code.co_filename, co_firstlineno=frame.f_lineno or 1, co_name=_NAME)
    torch_names.run_as_is(mine)
    call = FunctionType(mine, frame.f_globals)
    if len(_sites) >= _MOST_SITES:
        _sites.clear()
    _sites[key] = code, call  # the code is held: no other gets its id
    return call


def forget_sites() -> None:
    """Forget the program's code and globals when a capture ends."""
    _sites.clear()


def is_call(code: CodeType) -> bool:
    """Return whether it is the code of such a frame: it stands for a line of the program, which has a frame of its own."""
    return code.co_name == _NAME
