"""The questions that users of msprobe ask: why they no longer arise, or what the answer is here.

The net of the questions is captured once, and what ran in it is looked at by many tests.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch.nn import functional as F

import msprobe.pytorch.hook_module as shipped
import tensorprobe
from tensorprobe.errors import SettingsError
from tensorprobe.legacy.msprobe.cli import run as msprobe
from tensorprobe.legacy.wrapped import closed, read_list, shipped_ops
from tensorprobe.ops.names import canonical_op
from tensorprobe.record import Run, open_run
from tensorprobe.sim import npu_ops
from tests.builders.msprobe import conv_net, write_dump

SHIPPED_LIST = Path(shipped.__file__).with_name("support_wrap_ops.yaml")
MAGIC: dict[str, Callable[[Any, Any], Any]] = {
    "__add__": lambda x, i: x + x,
    "__and__": lambda x, i: i & i,
    "__div__": lambda x, i: x.__div__(x),
    "__eq__": lambda x, i: x == x,
    "__ge__": lambda x, i: x >= x,
    "__gt__": lambda x, i: x > x,
    "__iadd__": lambda x, i: x.__iadd__(x),
    "__iand__": lambda x, i: i.__iand__(i),
    "__idiv__": lambda x, i: x.__idiv__(x),
    "__ifloordiv__": lambda x, i: x.__ifloordiv__(x),
    "__ilshift__": lambda x, i: i.__ilshift__(i),
    "__imod__": lambda x, i: x.__imod__(x),
    "__imul__": lambda x, i: x.__imul__(x),
    "__ior__": lambda x, i: i.__ior__(i),
    "__irshift__": lambda x, i: i.__irshift__(i),
    "__isub__": lambda x, i: x.__isub__(x),
    "__ixor__": lambda x, i: i.__ixor__(i),
    "__lshift__": lambda x, i: i << i,
    "__matmul__": lambda x, i: x @ x,
    "__mod__": lambda x, i: x % x,
    "__mul__": lambda x, i: x * x,
    "__or__": lambda x, i: i | i,
    "__radd__": lambda x, i: 2 + x,
    "__rmul__": lambda x, i: 2 * x,
    "__rshift__": lambda x, i: i >> i,
    "__sub__": lambda x, i: x - x,
    "__truediv__": lambda x, i: x / x,
    "__xor__": lambda x, i: i ^ i,
}
"""The table of the FAQ, without `__bool__` and `__nonzero__`: they give back no tensor."""


class Seen(NamedTuple):
    """A captured program, and what it computed itself."""

    run: Run
    made: dict[str, Any]


def strict_activation(activation: Any, x: torch.Tensor) -> torch.Tensor:
    """As the programs of the FAQ check what they are given."""
    if activation is not F.gelu:
        raise ValueError("activation_func must be F.gelu")
    return F.gelu(x)


def ask(x: torch.Tensor, weight: torch.Tensor) -> dict[str, Any]:
    """The program: everything that the FAQ says goes wrong."""
    made: dict[str, Any] = {"gelu": strict_activation(F.gelu, x)}
    made["item"] = x[0, 1:]
    for name, wrong in (("index", lambda: x[0, 0, 0, 0]), ("len", lambda: len(x.sum()))):
        try:
            wrong()
        except (IndexError, TypeError) as error:
            made[name] = str(error)
    made["t"], made["transpose"] = x[0].t(), x.transpose(0, 1)
    made["linear"] = F.linear(x, weight)
    made["linear"].square().sum().backward()
    state = (torch.ones(1, 3, 5), torch.ones(1, 3, 5))
    made["lstm"] = torch.nn.LSTM(4, 5, batch_first=True)(x.detach(), state)[0]
    made["fused"] = npu_ops.register()["npu_scaled_masked_softmax"](x.detach(), x.detach() > 0, 0.5, False)
    made["half"] = x.detach().half() + 1
    made["dropout"] = F.dropout(torch.ones(1000), 0.5)
    made["bfloat16"] = x.detach().bfloat16().matmul(weight.detach().bfloat16().t())
    made["type_as"] = x.detach().type_as(torch.ones(1, dtype=torch.float16))
    return made


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    if not hasattr(torch.library, "register_autograd"):
        pytest.skip("needs torch 2.4: torch.library.register_autograd")
    tensorprobe.seed_all(1)
    x, weight = torch.randn(3, 4, 4, requires_grad=True), torch.randn(2, 4, requires_grad=True)
    place = tmp_path_factory.mktemp("faq") / "run"
    with tensorprobe.capture(place, level="api"):
        made = ask(x, weight)
    made["weight"], made["x"] = weight, x
    return Seen(open_run(place), made)


def test_indexing_is_recorded_and_raises_what_it_always_raised(seen: Seen) -> None:
    assert seen.made["index"] == "too many indices for tensor of dimension 3"
    assert seen.made["len"] == "len() of a 0-d tensor"
    call = seen.run.call("Tensor.__getitem__.0.forward")
    assert torch.equal(call.outputs[0].tensor(), seen.made["item"])


def test_gelu_is_still_itself_and_recorded(seen: Seen) -> None:
    assert torch.equal(seen.run.call("Functional.gelu.0.forward").outputs[0].tensor(), seen.made["gelu"])


def test_transposed_views_stay_views(seen: Seen) -> None:
    for name in ("t", "transpose"):
        made = seen.made[name]
        assert made.untyped_storage().data_ptr() == seen.made["x"].untyped_storage().data_ptr()
        assert torch.equal(seen.run.call(f"Tensor.{name}.0.forward").outputs[0].tensor(), made)


def test_the_gradient_of_the_weight_of_a_linear_of_more_dimensions_is_there(seen: Seen) -> None:
    gradients = {slot.name: slot for slot in seen.run.call("Functional.linear.0.backward").outputs}
    assert torch.equal(gradients["output.1"].tensor(), seen.made["weight"].grad)
    assert torch.equal(gradients["output.0"].tensor(), seen.made["x"].grad)


def test_tensors_in_lists_have_a_number_more(seen: Seen) -> None:
    names = [slot.name for slot in seen.run.call("VF.lstm.0.forward").slots]
    assert {"input.1.0", "input.1.1", "input.2.0"} <= {*names}


def test_a_fused_op_needs_no_line_in_any_list(seen: Seen) -> None:
    call = seen.run.call("NPU.npu_scaled_masked_softmax.0.forward")
    assert torch.equal(call.outputs[0].tensor(), seen.made["fused"])


def test_half_precision_stays_half_precision(seen: Seen) -> None:
    half = next(call for call in seen.run.calls() if call.op == "Tensor.add" and call.outputs[0].dtype == "float16")
    assert torch.equal(half.outputs[0].tensor(), seen.made["half"])


def test_every_magic_function_is_the_op_that_capture_names(tmp_path: Path) -> None:
    with tensorprobe.capture(tmp_path / "run", level="api"):
        x, i = torch.ones(2, 2), torch.ones(2, 2, dtype=torch.int32)
        for use in MAGIC.values():
            use(x.clone(), i.clone())
        assert bool(torch.ones(1))
    ops = [call.op for call in open_run(tmp_path / "run").calls() if call.op not in ("Torch.ones", "Tensor.clone")]
    assert [*map(canonical_op, ops)] == [canonical_op(f"Tensor.{name}") for name in MAGIC]
    unlisted = {"__idiv__", "__div__", "__nonzero__"}  # spelled otherwise by Python itself since version 3
    assert {f"Tensor.{name}" for name in MAGIC} - shipped_ops() <= {f"Tensor.{name}" for name in unlisted}


@pytest.fixture(scope="module")
def checked(seen: Seen) -> dict[str, Any]:
    wanted = ("*.dropout.*", "*.matmul.*", "*.type_as.*", "Functional.gelu.*")
    result = tensorprobe.precheck(seen.run, calls=wanted, jobs=0)
    return {check.op: check for check in result.summary.checks}


def test_dropout_is_judged_by_its_share_of_zeros(checked: dict[str, Any]) -> None:
    assert checked["Functional.dropout"].forward == "pass"


def test_bfloat16_is_checked(checked: dict[str, Any]) -> None:
    (detail,) = [one for one in checked["Tensor.matmul"].details if one.direction == "forward"]
    assert (detail.device_dtype, detail.result) == ("torch.bfloat16", "pass")


def test_the_reference_is_computed_in_higher_precision(checked: dict[str, Any]) -> None:
    dtypes = {(one.device_dtype, one.reference_dtype) for one in checked["Functional.gelu"].details}
    assert dtypes == {("torch.float32", "torch.float64")}


def test_conversions_are_checked_as_what_they_are(checked: dict[str, Any]) -> None:
    (detail,) = checked["Tensor.type_as"].details
    assert (detail.device_dtype, detail.result) == ("torch.float16", "pass")


@pytest.mark.parametrize("name", ["abc++", "with space", "模型 é", "a;b&c'd", "-dash", "[x]*?"])
def test_any_path_works(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    folder = Path(name).absolute()
    data, stacks, _ = conv_net()
    for side in ("npu", "bench"):
        write_dump(folder / side, data, task="statistics", stacks=stacks)
    paths = ["-tp", str(folder / "npu/dump.json"), "-gp", str(folder / "bench/dump.json")]
    assert msprobe(["compare", *paths, "-o", str(folder / "out")]) == 0
    assert Path(capsys.readouterr().out.rstrip("\n")).parent == folder / "out"


SHIPPED = SHIPPED_LIST.read_text(encoding="utf-8")


def edited(*changes: tuple[str, str]) -> Path:
    """The file that ships, with lines of it changed."""
    text = SHIPPED
    for old, new in changes:
        assert old in text
        text = text.replace(old, new, 1)
    path = Path("support_wrap_ops.yaml")
    path.write_text(text, encoding="utf-8")
    return path


def test_the_list_that_ships_closes_five_families() -> None:
    wrapped, excluded = read_list()
    assert wrapped == closed(shipped_ops()) and excluded == frozenset()
    assert {op.partition(".")[0] for op in wrapped} == {"Functional", "Tensor", "Torch", "VF", "Distributed"}
    assert {"Functional.gelu", "Tensor.__getitem__", "Tensor.t", "Tensor.transpose", "VF.lstm"} <= wrapped
    assert {"Distributed.all_reduce", "Torch.arange", "Torch.vector_norm", "Tensor.__bool__"} <= wrapped
    assert [op for op in wrapped if "_foreach_" in op or "_fused_" in op] == ["Torch._foreach_norm"]


def test_a_line_that_is_commented_out_leaves_its_api_out() -> None:
    path = edited(
        ("\n  - gelu\n", "\n#  - gelu\n"),
        ("\n  - __getitem__\n", "\n  # - __getitem__\n"),
        ("\n  - __add__\n", "\n  #- __add__   # an operator\n"),
        ("\n  - npu_iou\n", "\n  # - npu_iou\n"),
        ("\ntensor:\n", "\nTensor:\n"),
    )
    wrapped, excluded = read_list(path)
    left_out = {"Functional.gelu", "Tensor.__getitem__", "Tensor.__add__"}
    assert closed(shipped_ops()) - wrapped == left_out
    assert excluded == left_out | {"NPU.npu_iou"}


def test_a_line_that_is_added_brings_an_api_in() -> None:
    path = Path("own.yaml")
    path.write_text("torch_npu:\n  - npu_mine\n  # - npu_other\n  - npu_other\nfunctional:\n  - 'x'\n_VF:\n# - lstm\n")
    wrapped, excluded = read_list(path)
    assert wrapped == closed(frozenset({"Functional.x"})) and excluded == {"VF.lstm"}
    assert "Tensor." in wrapped  # nothing of a family that the file does not name


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("functional:\n  gelu\n", r"line 2: 'gelu' is neither a group"),
        ("functionals:\n  - gelu\n", r"line 1: there is no group 'functionals'. Did you mean 'functional'"),
        ("  - gelu\n", r"line 1: '- gelu' stands in no group"),
        ("tensor: {add: 1}\n", r"line 1: .* is neither"),
    ],
)
def test_a_list_of_another_form_is_told_with_its_line(text: str, says: str) -> None:
    Path("own.yaml").write_text(text)
    with pytest.raises(SettingsError, match=says):
        read_list("own.yaml")


def test_a_list_that_is_not_there_is_told() -> None:
    with pytest.raises(SettingsError, match=re.escape("'nowhere.yaml' cannot be read")):
        read_list("nowhere.yaml")


def test_the_list_that_ships_is_our_own_table() -> None:
    tool = Path(__file__).resolve().parents[2] / "tools" / "make_wrap_ops.py"
    spec = importlib.util.spec_from_file_location("make_wrap_ops", tool)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.render() == SHIPPED
