"""Every kind of tensor: recorded exactly, or skipped with a reason that is counted; never a crash, never a changed result."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import tensorprobe
from tensorprobe.record.stored import StoredSlot
from tests.builders.dtypes import KNOWN_DTYPES
from tests.taps.tiny import LEVELS, names, record, slot, the_call, value

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*prototype stage.*:UserWarning",
    "ignore:.*quantiz.*",
    "ignore:.*omplex.*",
    "ignore:.*torch.jit.*:DeprecationWarning",
    "ignore:.*torch.jit.*:FutureWarning",
    "ignore:.*CSR.*",
)

ALL_DTYPES = [getattr(torch, name) for name in KNOWN_DTYPES]


def same_bits(ours: Tensor, theirs: Tensor) -> bool:
    """Equal in dtype, shape and every bit."""
    if ours.dtype != theirs.dtype or ours.shape != theirs.shape:
        return False
    raw = [t.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8) for t in (ours, theirs)]
    return torch.equal(*raw)


def recorded_input(out: Path, tensor: Any, op: Callable[[Any], Any] = torch.clone, **settings: Any) -> StoredSlot:
    """The slot of a tensor that was given to an op."""
    run = record(out, lambda: op(tensor), **settings)
    (call,) = [call for call in run.calls() if call.direction == "forward" and call.op == f"Torch.{op.__name__}"]
    return call.inputs[0]


@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=str)
def test_each_dtype_is_recorded_to_the_bit(dtype: torch.dtype, tmp_path: Path) -> None:
    raw = torch.arange(96, dtype=torch.uint8).view(6, 16)
    tensor = (raw % 2 if dtype is torch.bool else raw.reshape(-1)).view(dtype).reshape(6, -1)
    found = recorded_input(tmp_path / "run", tensor)
    assert found.dtype == str(dtype).removeprefix("torch.")
    assert same_bits(found.tensor(), tensor)
    assert found.summary is not None


VIEWS: dict[str, Callable[[], Tensor]] = {
    "transposed": lambda: torch.arange(6.0).view(2, 3).t(),
    "permuted": lambda: torch.arange(24.0).view(2, 3, 4).permute(2, 0, 1),
    "channels last": lambda: torch.arange(48.0).view(2, 3, 2, 4).to(memory_format=torch.channels_last),
    "every second": lambda: torch.arange(12.0)[::2],
    "a column": lambda: torch.arange(12.0).view(3, 4)[:, 1],
    "flipped": lambda: torch.arange(5.0).flip(0),
    "expanded": lambda: torch.arange(3.0).expand(4, 3),
    "overlapping": lambda: torch.arange(6.0).as_strided((3, 3), (1, 1)),
    "unfolded": lambda: torch.arange(8.0).unfold(0, 4, 2),
    "with an offset": lambda: torch.arange(12.0)[5:],
    "size one dimensions": lambda: torch.arange(6.0).view(2, 1, 3).transpose(0, 2),
    "zero elements": lambda: torch.empty(0, 3),
    "zero elements, transposed": lambda: torch.empty(4, 0, 3).permute(2, 1, 0),
    "0-d": lambda: torch.tensor(3.5),
    "conjugated": lambda: torch.tensor([1 + 2j, 3 - 4j]).conj(),
    "conjugated and transposed": lambda: torch.randn(2, 3, dtype=torch.complex64).mH,
    "negated": lambda: torch.tensor([1 + 2j, 3 - 4j]).conj().imag,
    "real part": lambda: torch.tensor([1 + 2j, 3 - 4j]).real,
    "not finite": lambda: torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0]),
    "13 dimensions": lambda: torch.ones([1] * 12 + [3]),
}


@pytest.mark.parametrize("kind", VIEWS)
@pytest.mark.parametrize("settings", [{}, {"in_process": True}], ids=["process", "thread"])
def test_each_view_is_recorded_to_the_bit(kind: str, settings: dict[str, Any], tmp_path: Path) -> None:
    tensor = VIEWS[kind]()
    found = recorded_input(tmp_path / "run", tensor, **settings)
    assert found.shape == tuple(tensor.shape)
    assert same_bits(found.tensor(), tensor)
    assert found.stride == (None if tensor.is_contiguous() else tensor.stride())


def sparse() -> Tensor:
    return torch.eye(3).to_sparse()


SKIPPED: dict[str, tuple[Callable[[], Any], str]] = {
    "sparse coo": (sparse, "sparse coo tensor"),
    "sparse csr": (lambda: torch.eye(3).to_sparse_csr(), "sparse csr tensor"),
    "quantized": (lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8), "quantized tensor"),
    "nested": (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "nested tensor"),
    "jagged": (
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
        "nested tensor",
    ),
    "meta": (lambda: torch.ones(3, device="meta"), "meta tensor, has no values"),
}
NEEDS = {"jagged": [pytest.mark.needs_torch("2.3", "jagged tensors")]}
KINDS = [pytest.param(kind, marks=NEEDS.get(kind, ())) for kind in SKIPPED]


@pytest.mark.parametrize("kind", KINDS)
def test_what_has_no_plain_values_is_skipped_with_a_reason_and_counted(kind: str, tmp_path: Path) -> None:
    make, reason = SKIPPED[kind]
    tensor = make()
    with tensorprobe.capture(tmp_path / "run") as probe:
        torch.clone(tensor)
        torch.sin(torch.ones(2))
    run = tensorprobe.open_run(tmp_path / "run")
    found = the_call(run, "Torch.clone.0.forward").inputs[0]
    assert found.skipped == reason
    assert not found.has_data
    assert probe.coverage is not None
    assert probe.coverage.slots_skipped[reason] >= 2
    assert probe.coverage.failed == 0
    assert same_bits(value(the_call(run, "Torch.sin.0.forward"), "input.0"), torch.ones(2))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", KINDS)
def test_odd_tensors_do_no_harm_at_any_level(kind: str, level: str, tmp_path: Path) -> None:
    with tensorprobe.capture(tmp_path / "run", level=level) as probe:
        tensor = SKIPPED[kind][0]()
        result = torch.clone(tensor)
        torch.nn.Identity()(tensor)
    assert type(result) is type(tensor)
    assert result.layout == tensor.layout
    assert probe.coverage is not None
    assert probe.coverage.failed == 0


def test_tensors_of_inference_mode_are_recorded(tmp_path: Path) -> None:
    def action() -> None:
        with torch.inference_mode():
            tensor = torch.arange(3.0)
            tensor.add_(1)
            torch.sin(tensor)

    run = record(tmp_path / "run", action)
    assert torch.equal(value(the_call(run, "Tensor.add_.0.forward"), "input.0"), torch.arange(3.0))
    assert torch.equal(value(the_call(run, "Torch.sin.0.forward"), "input.0"), torch.arange(3.0) + 1)


class Tagged(torch.Tensor):
    """A subclass as users write them: same data, a type of its own."""


class Wrapping(torch.Tensor):
    """A subclass that holds another tensor and has no data of its own."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Wrapping:
        wrapper = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)  # type: ignore[attr-defined]
        wrapper.inner = inner
        return wrapper

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        unwrapped = [arg.inner if isinstance(arg, Wrapping) else arg for arg in args]
        return cls(func(*unwrapped, **(kwargs or {})))


def test_simple_subclass_is_recorded_as_what_it_holds(tmp_path: Path) -> None:
    tensor = torch.arange(3.0).as_subclass(Tagged)
    with tensorprobe.capture(tmp_path / "run"):
        result = torch.sin(tensor)
    assert type(result) is Tagged
    run = tensorprobe.open_run(tmp_path / "run")
    assert torch.equal(value(the_call(run, "Torch.sin.0.forward"), "input.0"), torch.arange(3.0))


@pytest.mark.parametrize("level", LEVELS)
def test_wrapper_subclass_is_skipped_and_works(level: str, tmp_path: Path) -> None:
    with tensorprobe.capture(tmp_path / "run", level=level) as probe:
        result = torch.sin(Wrapping(torch.arange(3.0)))
    assert isinstance(result, Wrapping)
    assert torch.equal(result.inner, torch.sin(torch.arange(3.0)))
    assert probe.coverage is not None
    assert probe.coverage.failed == 0
    if level in ("api", "mix"):
        assert probe.coverage.slots_skipped["tensor subclass Wrapping"] == 2


@pytest.mark.parametrize("level", LEVELS)
def test_functorch_transforms_give_the_same_results(level: str, tmp_path: Path) -> None:
    data = torch.arange(6.0).view(2, 3)
    plain = transforms(data)
    with tensorprobe.capture(tmp_path / "run", level=level) as probe:
        captured = transforms(data)
    for ours, theirs in zip(plain, captured, strict=True):
        assert torch.equal(ours, theirs)
    assert probe.coverage is not None
    assert probe.coverage.failed == 0


def transforms(data: Tensor) -> list[Tensor]:
    def loss(x: Tensor) -> Tensor:
        return torch.sin(x).t().mul(2).pow(2).sum() if x.dim() == 2 else torch.sin(x).pow(2).sum()

    return [
        torch.vmap(loss)(data),
        torch.func.grad(loss)(data),
        torch.vmap(torch.func.grad(loss))(data),
        torch.func.jacrev(torch.sin)(data[0]),
        torch.func.jvp(torch.sin, (data,), (data,))[1],
        torch.func.functionalize(lambda x: x.clone().add_(1))(data),
    ]


def test_fake_tensors_do_no_harm(tmp_path: Path) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with tensorprobe.capture(tmp_path / "run") as probe, FakeTensorMode():
        result = torch.ones(3) + 1
    assert result.shape == (3,)
    assert probe.coverage is not None
    assert probe.coverage.failed == 0


def test_inputs_of_in_place_ops_are_recorded_as_they_were_before(tmp_path: Path) -> None:
    def action() -> None:
        tensor = torch.arange(4.0)
        tensor.mul_(2)
        tensor += 1
        tensor[1:3] = 0.0
        torch.nn.functional.relu(tensor, inplace=True)
        torch.add(tensor, 1, out=tensor)
        tensor.index_copy_(0, torch.tensor([0]), torch.tensor([9.0]))

    run = record(tmp_path / "run", action)
    steps = [
        ("Tensor.mul_.0.forward", [0, 1, 2, 3], [0, 2, 4, 6]),
        ("Tensor.add_.0.forward", [0, 2, 4, 6], [1, 3, 5, 7]),
        ("Tensor.__setitem__.0.forward", [1, 3, 5, 7], [1, 0, 0, 7]),
        ("Functional.relu.0.forward", [1, 0, 0, 7], [1, 0, 0, 7]),
        ("Torch.add.0.forward", [1, 0, 0, 7], [2, 1, 1, 8]),
        ("Tensor.index_copy_.0.forward", [2, 1, 1, 8], [9, 1, 1, 8]),
    ]
    in_place_add = [name for name in names(run) if "add" in name and name.startswith("Tensor")]
    steps[1] = (in_place_add[0], *steps[1][1:])
    for name, before, after in steps:
        call = the_call(run, name)
        assert value(call, "input.0").tolist() == before, name
        assert value(call, "output.0").tolist() == after, name


def test_changed_arguments_are_outputs_too(tmp_path: Path) -> None:
    norm = torch.nn.BatchNorm1d(2)
    data = torch.randn(5, 2)
    run = record(tmp_path / "run", lambda: norm(data))
    call = the_call(run, "Functional.batch_norm.0.forward")
    assert torch.equal(value(call, "input.1"), torch.zeros(2))
    assert torch.equal(value(call, "output.changed.1"), norm.running_mean)


def test_memory_that_is_not_initialised_is_not_recorded(tmp_path: Path) -> None:
    run = record(tmp_path / "run", lambda: torch.empty(3).fill_(1))
    assert slot(the_call(run, "Torch.empty.0.forward"), "output.0").skipped == "memory not yet initialised"
    assert torch.equal(value(the_call(run, "Tensor.fill_.0.forward"), "output.0"), torch.ones(3))


def test_what_a_call_only_writes_to_is_not_an_input(tmp_path: Path) -> None:
    target = torch.full((3,), 7.0)
    run = record(tmp_path / "run", lambda: torch.sin(torch.ones(3), out=target))
    call = the_call(run, "Torch.sin.0.forward")
    assert slot(call, "input.kwargs.out").skipped == "only written to by the call"
    assert torch.equal(value(call, "output.0"), torch.sin(torch.ones(3)))


def test_arguments_that_are_not_tensors_are_kept_as_a_tree(tmp_path: Path) -> None:
    tensor = torch.arange(24.0).view(2, 3, 4)

    def action() -> None:
        tensor[1, ..., 0:3:2]
        torch.full((2,), float("-inf"), dtype=torch.float64, device="cpu")
        torch.einsum("ij,jk->ik", tensor[0], tensor[1].t())

    run = record(tmp_path / "run", action)
    index = the_call(run, "Tensor.__getitem__.0.forward").args[1]["value"]
    assert index[0] == 1
    assert index[1]["type"] == "ellipsis"
    assert index[2] == {"type": "slice", "value": [0, 3, 2]}
    full = the_call(run, "Torch.full.0.forward")
    assert full.args[1] == {"type": "float", "value": "-Infinity"}
    assert full.kwargs["dtype"] == {"type": "torch.dtype", "value": "float64"}
    einsum = the_call(run, "Torch.einsum.0.forward")
    assert einsum.args[0] == "ij,jk->ik"


def test_tensor_of_which_the_bytes_come_from_numpy_or_shared_memory_is_recorded(tmp_path: Path) -> None:
    import numpy

    array = numpy.arange(3.0)
    shared = torch.arange(4.0).share_memory_()
    run = record(tmp_path / "run", lambda: (torch.sin(torch.from_numpy(array)), torch.cos(shared)))
    assert value(the_call(run, "Torch.sin.0.forward"), "input.0").tolist() == [0, 1, 2]
    assert value(the_call(run, "Torch.cos.0.forward"), "input.0").tolist() == [0, 1, 2, 3]
