"""`mode="acl"` on an NPU: torch_npu's own dump is switched on around the named call, once, and training stays the same."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ptdbg_ascend as ptdbg
from tensorprobe.errors import CaptureIncomplete
from tensorprobe.legacy.ptdbg import acl, dump
from tensorprobe.sim import npu_module as stand_in

WHOLE = ["init_dump", "set_dump", "finalize_dump"]


@pytest.fixture(autouse=True)
def fresh(npu: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TASK_QUEUE_ENABLE", "0")
    state = dump._State()
    monkeypatch.setattr(dump, "_state", state)
    stand_in.dump_calls.clear()
    fields = {"dump_list": [], "dump_path": "acl_out", "dump_mode": "all", "dump_op_switch": "on"}
    Path("dump.json").write_text(json.dumps({"dump": fields}))
    yield
    stand_in.dump_calls.clear()
    assert state.probe is None


class Net(nn.Module):
    """Functional.batch_norm calls torch.batch_norm inside: two APIs, one of which is named."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm1, self.norm2, self.head = nn.BatchNorm1d(3), nn.BatchNorm1d(3), nn.Linear(3, 2)

    def forward(self, data: Tensor) -> Tensor:
        hidden = F.dropout(self.norm2(torch.relu_(self.norm1(data))), 0.4)
        self.out = self.head(hidden)
        self.out.retain_grad()
        return self.out.square().sum()


def step(net: Net) -> list[Tensor]:
    torch.npu.manual_seed(3)
    net.zero_grad()
    loss = net(torch.randn(5, 3, generator=torch.Generator().manual_seed(2)).npu())
    loss.backward()
    left = [
        loss.detach(),
        *(parameter.grad for parameter in net.parameters()),
        *net.buffers(),
        torch.npu.get_rng_state(),
    ]
    return [tensor.clone().cpu() for tensor in left]


def dumped(net: nn.Module, name: str, action: Any, gradients: list[str] | None = None) -> list[tuple[str, ...]]:
    ptdbg.set_dump_path("./npu_dump.pkl")
    ptdbg.register_hook(net, ptdbg.acc_cmp_dump, dump_mode="acl", dump_config="dump.json")
    ptdbg.set_dump_switch("ON", mode="acl", scope=[name])
    if gradients is not None:
        ptdbg.set_backward_input(gradients)
    action()
    ptdbg.set_dump_switch("OFF")
    return list(stand_in.dump_calls)


@pytest.mark.parametrize(
    "name", ["Functional_batch_norm_1_forward", "Torch_relu__0_forward", "Functional_linear_0_forward"]
)
def test_forward_is_dumped_once(name: str) -> None:
    plain = step(Net().npu())
    net = Net().npu()
    watched: list[Tensor] = []
    calls = dumped(net, name, lambda: watched.extend(step(net)))
    assert calls == [("init_dump",), ("set_dump", str(Path("dump.json").absolute())), ("finalize_dump",)]
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(plain, watched, strict=True))
    assert not Path("acl_out").exists()


def test_device_is_waited_for_before_and_after(monkeypatch: pytest.MonkeyPatch) -> None:
    net = Net().npu()
    monkeypatch.setattr(torch.npu, "synchronize", lambda: stand_in.dump_calls.append(("synchronize",)))
    calls = dumped(net, "Functional_linear_0_forward", lambda: step(net))
    assert [call[0] for call in calls] == ["init_dump", "set_dump", "synchronize", "synchronize", "finalize_dump"]


@pytest.mark.parametrize("name", ["Functional_linear_0_backward", "Functional_batch_norm_1_backward"])
def test_backward_with_gradients_is_dumped_once(name: str) -> None:
    first = Net().npu()
    plain = step(first)
    gradient = first.out.grad.cpu().numpy() if "linear" in name else numpy.ones((5, 3), dtype=numpy.float32)
    numpy.save("grad.npy", gradient)
    net = Net().npu()
    watched: list[Tensor] = []
    calls = dumped(net, name, lambda: watched.extend(step(net)), ["grad.npy"])
    assert [call[0] for call in calls] == WHOLE
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(plain, watched, strict=True))


def test_backward_without_gradients_is_not_dumped_and_told(caplog: pytest.LogCaptureFixture) -> None:
    net = Net().npu()
    with caplog.at_level(logging.WARNING):
        assert dumped(net, "Functional_linear_0_backward", lambda: step(net)) == []
    assert (
        "Functional_linear_0_backward: nothing was dumped. On an NPU a backward call needs its gradients" in caplog.text
    )


def test_name_that_does_not_occur_is_told_with_the_nearest() -> None:
    net = Net().npu()
    with pytest.warns(
        CaptureIncomplete, match=r"nothing matched 'Functional\.linear\.4\.forward'\. Nearest: Functional\.linear\.0"
    ):
        assert dumped(net, "Functional_linear_4_forward", lambda: step(net)) == []


@pytest.mark.parametrize("value", ["1", None])
def test_queue_that_runs_kernels_later_is_warned_of(
    value: str | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("TASK_QUEUE_ENABLE")
    if value is not None:
        monkeypatch.setenv("TASK_QUEUE_ENABLE", value)
    net = Net().npu()
    with caplog.at_level(logging.WARNING):
        dumped(net, "Functional_linear_0_forward", lambda: step(net))
    assert "export TASK_QUEUE_ENABLE=0" in caplog.text


def test_no_warning_when_the_queue_is_off(caplog: pytest.LogCaptureFixture) -> None:
    net = Net().npu()
    with caplog.at_level(logging.WARNING):
        dumped(net, "Functional_linear_0_forward", lambda: step(net))
    assert caplog.records == []


def test_failure_of_the_device_does_not_reach_training(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: str) -> None:
        raise RuntimeError("acl error 107002")

    plain = step(Net().npu())
    net = Net().npu()
    monkeypatch.setattr(torch.npu, "set_dump", fail)
    watched: list[Tensor] = []
    with pytest.warns(CaptureIncomplete, match="RuntimeError: acl error 107002"):
        calls = dumped(net, "Functional_linear_0_forward", lambda: watched.extend(step(net)))
    assert [call[0] for call in calls] == ["init_dump", "finalize_dump"]
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(plain, watched, strict=True))


def test_model_that_is_not_on_the_npu_is_recorded_by_ourselves() -> None:
    net = nn.Linear(3, 2)
    assert not acl.device_is_npu(net)
    assert dumped(net, "Functional_linear_0_forward", lambda: net(torch.ones(1, 3))) == []
    assert [path.name for path in Path("acl_out").rglob("addmm*output*")] != []


def test_model_on_the_device_is_recorded_by_ourselves_where_torch_npu_cannot_dump(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(acl, "device_is_npu", lambda model: False)
    numpy.save("grad.npy", numpy.ones((5, 2), dtype=numpy.float32))
    plain = step(Net().npu())
    net = Net().npu()
    watched: list[Tensor] = []
    assert dumped(net, "Functional_linear_0_backward", lambda: watched.extend(step(net)), ["grad.npy"]) == []
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(plain, watched, strict=True))
    files = list(Path("acl_out").rglob("mm.mm_default_*.output.0.npy"))
    assert {tuple(numpy.load(path).shape) for path in files} == {(5, 3), (2, 3)}
