"""Names of ops in a hostile file: none reaches a file, a process, a device, global state or storage, however it is spelled."""

from __future__ import annotations

import os
import sys
import types
from pathlib import Path

import numpy
import pytest
import torch

from tensorprobe.checks import audit, precheck
from tensorprobe.ops.table import _REFUSED
from tensorprobe.replay.functions import _REFUSED_LIBRARIES, CannotReplay, find_op
from tests.builders.runs import call as made_call
from tests.builders.runs import write

OF_FILES = [
    f"{home}.{name}"
    for name in ("from_file", "from_file.default", "from_file.out")
    for home in (
        "Torch",
        "VF",
        "Aten",
        "Aten.aten",
        "Ops.aten",
        "Torch.ops.aten",
        "Torch._VF",
        "Torch._C._VariableFunctions",
    )
]
NAMES = [
    *OF_FILES,
    *(f"NPU.{name}" for name in ("os.system", "os.mkdir", "os", "system", "borrowed", "torch.load", "npu.set_device")),
    *(f"NPU.{name}" for name in ("npu_set_option", "set_dump", "save", "Thing", "_private", "npu_ok.__globals__")),
    *(f"Torch.{name}" for name in ("load", "save", "set_num_threads", "set_default_dtype", "compile", "os.system")),
    *(f"Torch.{name}" for name in ("hub.load", "hub.download_url_to_file", "jit.load", "jit.save", "manual_seed", "seed")),
    *(f"Torch.{name}" for name in ("ops.load_library", "classes.load_library", "utils.cpp_extension.load", "use_deterministic_algorithms")),
    *(f"Torch.{name}" for name in ("cuda.set_device", "multiprocessing.spawn", "serialization.load", "_C._jit_set_profiling_mode")),
    *(f"Torch.{name}" for name in ("zeros.__self__", "add.__class__", "Tensor.add", "UntypedStorage.from_file", "frombuffer")),
    *(f"Torch.nn.functional.{name}" for name in ("torch.os.system", "importlib.import_module", "handle_torch_function")),
    *(f"Functional.{name}" for name in ("torch.os.system", "torch.load", "importlib.import_module", "warnings.warn", "boolean_dispatch")),
    *(f"Functional.{name}" for name in ("softmax.__globals__", "softmax.__globals__.get", "softmax.__code__", "_add_docstr")),
    *(f"Tensor.{name}" for name in ("numpy", "numpy.tofile", "tofile", "tolist", "storage", "untyped_storage", "data_ptr", "set_")),
    *(f"Tensor.{name}" for name in ("share_memory_", "apply_", "map_", "register_hook", "backward", "pin_memory", "cuda", "resize_")),
    *(f"Tensor.{name}" for name in ("__class__", "__class__.__base__", "__init_subclass__", "__reduce_ex__", "__setstate__", "__dlpack__")),
    *(f"Tensor.{name}" for name in ("_make_subclass", "_make_wrapper_subclass", "__torch_function__", "__subclasshook__", "module_load")),
    *(f"Ops.{name}" for name in ("load_library", "loaded_libraries.add", "aten.save.default", "prim.Print.default", "prim.rpc_sync")),
    *(f"Ops.{name}" for name in ("aten.set_.source_Storage", "aten.set_data.default", "aten.record_stream.default", "aten.warn.default")),
    *(f"Ops.{name}" for name in ("c10d.send.default", "_c10d_functional.all_reduce.default", "inductor._reinterpret_tensor.default")),
    *(f"Ops.{name}" for name in ("aten.__class__", "aten.mm.__class__", "aten.mm.default.__self__", "profiler._record_function_enter")),
    *(f"Aten.{name}" for name in ("save", "save.default", "resize_.default", "set_grad_enabled.default", "manual_seed.default")),
    *("os.system", "builtins.eval", "", ".", "Torch.", "Torch..add", "Tensor", "Torch.a dd", "Torch.\u200badd", "Torch.add\n"),
]  # fmt: skip


@pytest.fixture(autouse=True)
def planted_npu(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A torch_npu with one honest function and everything that a package has besides."""
    package = types.ModuleType("torch_npu")

    def define(name: str, home: str) -> None:
        def function(x: torch.Tensor) -> torch.Tensor:
            return x + 1

        function.__module__ = home
        setattr(package, name, function)

    for name in ("npu_ok", "npu_set_option", "set_dump", "save", "_private"):
        define(name, "torch_npu.npu_ops")
    define("borrowed", "somewhere_else")
    vars(package).update(os=os, system=os.system, torch=torch, npu=torch.cuda, Thing=type("Thing", (), {}))
    monkeypatch.setitem(sys.modules, "torch_npu", package)
    find_op.cache_clear()
    return package


@pytest.mark.parametrize("name", NAMES)
def test_a_hostile_name_is_refused(name: str) -> None:
    with pytest.raises(CannotReplay):
        find_op(name)


@pytest.mark.parametrize("name", _REFUSED)
def test_every_entry_of_the_table_is_refused_in_every_family(name: str) -> None:
    for family in ("Torch", "Tensor", "Functional", "VF", "Aten", "Ops.aten", "NPU", "Torch.nn.functional"):
        for op in (f"{family}.{name}", f"{family}.{name}.default"):
            with pytest.raises(CannotReplay):
                find_op(op)


@pytest.mark.parametrize("library", _REFUSED_LIBRARIES)
def test_no_operator_of_a_refused_library_is_found(library: str) -> None:
    names = {
        schema.name.partition("::")[2]
        for schema in torch._C._jit_get_all_schemas()
        if schema.name.startswith(f"{library}::")
    }
    for name in names or {"anything"}:
        for op in (f"Ops.{library}.{name}", f"Aten.{library}.{name}.default"):
            with pytest.raises(CannotReplay):
                find_op(op)


def test_an_operator_of_another_library_may_not_take_text() -> None:
    library = torch.library.Library("attack_lib", "DEF")
    library.define("keep(Tensor x, str where) -> Tensor")
    library.define("twice(Tensor x) -> Tensor")
    assert find_op("Ops.attack_lib.twice.default").path == "torch.ops.attack_lib.twice.default"
    with pytest.raises(CannotReplay):
        find_op("Ops.attack_lib.keep.default")


HONEST = {
    "Torch.add": "torch.add",
    "Torch.linalg.norm": "torch.linalg.norm",
    "Torch.functional.split": "torch.functional.split",
    "Torch.split": "torch.split",
    "Torch._foreach_add": "torch._foreach_add",
    "Torch._fused_adamw_": "torch._fused_adamw_",
    "Torch.zeros": "torch.zeros",
    "Torch.tensor": "torch.tensor",
    "Torch.nn.init.uniform_": "torch.nn.init.uniform_",
    "Functional.gelu": "torch.nn.functional.gelu",
    "Functional.relu_": "torch.nn.functional.relu_",
    "Functional.max_pool2d": "torch.nn.functional.max_pool2d",
    "Functional.upsample": "torch.nn.functional.upsample",
    "Tensor.__getitem__": "torch.Tensor.__getitem__",
    "Tensor.cpu": "torch.Tensor.cpu",
    "Tensor.new_tensor": "torch.Tensor.new_tensor",
    "VF.lstm": "torch._VF.lstm",
    "Aten.mm.default": "torch.ops.aten.mm.default",
    "Aten.random_.from": "getattr(torch.ops.aten.random_, 'from')",
    "Ops.aten.mm": "torch.ops.aten.mm",
    "Ops.prims.add.default": "torch.ops.prims.add.default",
    "NPU.npu_ok": "torch_npu.npu_ok",
}


@pytest.mark.parametrize("name", HONEST)
def test_an_honest_name_is_found(name: str) -> None:
    assert find_op(name).path == HONEST[name]


def test_every_function_found_is_one_of_torch_or_of_the_device() -> None:
    """Whatever can be named in one step from the homes is a function, never a module, a class or a bound method."""
    found = 0
    for family, home in {"Torch": torch, "Functional": torch.nn.functional, "Tensor": torch.Tensor}.items():
        for name in dir(home):
            try:
                function = find_op(f"{family}.{name}").function
            except CannotReplay:
                continue
            found += 1
            assert not isinstance(function, (type, types.ModuleType, types.MethodType)), name
    assert found > 1000


def test_results_that_we_cannot_measure_are_no_failure_of_ours(tmp_path: Path) -> None:
    ones, slot = numpy.ones((2, 3), "float32"), {"slot": "input.0"}
    dtype = {"type": "torch.dtype", "value": "torch.complex128"}
    calls = [
        made_call(f"{name}.forward", inputs=[ones], outputs=[ones], args=[slot, *more])
        for name, *more in (
            ("Tensor.to.0", "meta"),
            ("Tensor.to.1", dtype),
            ("Tensor.to_sparse.0",),
            ("Tensor.to_mkldnn.0",),
        )
    ]
    run = write(tmp_path / "run", calls)
    for check in (precheck, audit):
        assert not [note for note in check(run, jobs=0).summary.notes if "itself failed" in note]


@pytest.mark.parametrize("jobs", [0, 1])
def test_a_hostile_run_makes_no_file(tmp_path: Path, jobs: int) -> None:
    target = tmp_path / "owned"
    attacks = [
        ("NPU.os.mkdir", [str(target)]),
        ("NPU.os.system", [f"touch {target}"]),
        *((name, [str(target), True, 16]) for name in OF_FILES),
    ]
    names = [name for name, _ in attacks]
    calls = [
        made_call(f"{name}.0.forward", inputs=[numpy.ones(2, "float32")], args=args)
        for name, args in attacks
        if all(part.isidentifier() for part in name.split("."))
    ]
    result = precheck(write(tmp_path / "run", calls), jobs=jobs)
    assert not target.exists()
    assert (result.summary.skipped, len(result.checks)) == (len(names), len(names))
