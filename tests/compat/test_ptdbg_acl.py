"""`mode="acl"` where there is no NPU: the ATen calls inside one API call, in the folders that the guide shows."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ptdbg_ascend as ptdbg
from tensorprobe.errors import CaptureIncomplete, SettingsError, UnknownSetting
from tensorprobe.legacy.ptdbg import acl

FILE = re.compile(r"(\w+)\.(\w+)\.(\d+)\.0\.(\d{16})\.(input|output)\.([\w.]+)\.npy")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv1, self.conv2 = nn.Conv2d(3, 3, 3), nn.Conv2d(3, 2, 3)

    def forward(self, images: Tensor) -> Tensor:
        self.hidden = torch.relu(self.conv1(images))
        self.out = self.conv2(self.hidden)
        self.out.retain_grad()
        return F.dropout(self.out, 0.5).square().sum()


def images() -> Tensor:
    return torch.randn(2, 3, 7, 7, generator=torch.Generator().manual_seed(1))


def step(net: Net) -> list[Tensor]:
    torch.manual_seed(5)
    net.zero_grad()
    loss = net(images())
    loss.backward()
    return [loss.detach(), *(parameter.grad.clone() for parameter in net.parameters()), torch.get_rng_state()]


def write_config(**changes: Any) -> Path:
    fields = {"dump_list": [], "dump_path": "acl_out", "dump_mode": "all", "dump_op_switch": "on", **changes}
    path = Path("dump.json")
    path.write_text(json.dumps({"dump": {key: value for key, value in fields.items() if value is not None}}))
    return path


def dump(net: nn.Module, name: str, action: Any, gradients: list[str] | None = None) -> Path:
    """The folder of a dump that is ordered as the guide does it."""
    ptdbg.set_dump_path("./npu_dump.pkl")
    ptdbg.register_hook(net, ptdbg.acc_cmp_dump, dump_mode="acl", dump_config="dump.json")
    before = set(Path("acl_out").glob("*"))
    ptdbg.set_dump_switch("ON", mode="acl", scope=[name])
    if gradients is not None:
        ptdbg.set_backward_input(gradients)
    action()
    ptdbg.set_dump_switch("OFF")
    (folder,) = set(Path("acl_out").glob("*")) - before
    assert re.fullmatch(r"20\d{12}", folder.name)
    assert sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_dir()) == ["0", "0/0"]
    return folder / "0" / "0"


def read(folder: Path) -> dict[str, Any]:
    """`convolution_default_0.input.0` → array, in the order of the kernels; by the names of the files only."""
    found = []
    for path in folder.iterdir():
        match = FILE.fullmatch(path.name)
        assert match is not None, path.name
        kind, name, task, _, side, place = match.groups()
        assert name.startswith(kind)
        found.append((int(task), f"{name}.{side}.{place}", numpy.load(path, allow_pickle=False)))
    return {name: array for _, name, array in sorted(found, key=lambda entry: entry[:2])}


def test_forward_has_the_kernels_of_that_call(tmp_path: Path) -> None:
    write_config()
    net = Net()
    files = read(dump(net, "Functional_conv2d_1_forward", lambda: step(net)))
    assert list(files) == [f"convolution_default_1.{slot}" for slot in ("input.0", "input.1", "input.2", "output.0")]
    assert numpy.array_equal(files["convolution_default_1.output.0"], net.out.detach().numpy())
    assert numpy.array_equal(files["convolution_default_1.input.1"], net.conv2.weight.detach().numpy())


@pytest.mark.parametrize(("mode", "sides"), [("input", {"input"}), ("output", {"output"}), (None, {"output"})])
def test_dump_mode_chooses_the_side(mode: str | None, sides: set[str], tmp_path: Path) -> None:
    write_config(dump_mode=mode)
    net = Net()
    files = read(dump(net, "Functional_conv2d_1_forward", lambda: step(net)))
    assert {name.split(".")[1] for name in files} == sides


def test_backward_without_gradients_is_the_true_one(tmp_path: Path) -> None:
    write_config()
    net = Net()
    files = read(dump(net, "Functional_conv2d_0_backward", lambda: step(net)))
    assert numpy.array_equal(files["convolution_backward_default_1.output.1"], net.conv1.weight.grad.numpy())


def test_backward_with_gradients_is_run_alone_and_training_stays_the_same(tmp_path: Path) -> None:
    write_config()
    net = Net()
    plain = step(net)
    gradient = net.out.grad.numpy()
    numpy.save("Functional_conv2d_1_backward_input.0.npy", gradient * 2)
    watched: list[Tensor] = []
    folder = dump(
        net,
        "Functional_conv2d_1_backward",
        lambda: watched.extend(step(net)),
        ["Functional_conv2d_1_backward_input.0.npy"],
    )
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(plain, watched, strict=True))
    files = read(folder)
    assert {name.split(".")[0] for name in files} == {"convolution_backward_default_0"}
    assert numpy.array_equal(files["convolution_backward_default_0.input.0"], gradient * 2)
    numpy.testing.assert_allclose(
        files["convolution_backward_default_0.output.1"], net.conv2.weight.grad.numpy() * 2, rtol=1e-5
    )


def test_gradients_of_bfloat16_are_read_from_a_wider_file(tmp_path: Path) -> None:
    write_config(dump_mode="input")
    numpy.save("grad.npy", numpy.array([0.5, -2.0], dtype=numpy.float32))
    net = nn.Linear(1, 1)
    data = torch.ones(2, dtype=torch.bfloat16, requires_grad=True)
    files = read(dump(net, "Torch_sin_0_backward", lambda: torch.sin(data), ["grad.npy"]))
    assert files["mul_Tensor_0.input.0"].tolist() == [0.5, -2.0]


def test_output_that_is_no_tensor_is_told_in_the_words_of_the_guide(caplog: pytest.LogCaptureFixture) -> None:
    write_config()
    numpy.save("grad.npy", numpy.ones(2, dtype=numpy.float32))
    data = torch.ones(4, requires_grad=True)
    with (
        pytest.warns(CaptureIncomplete, match=r"nothing matched 'Torch\.split\.0\.backward'"),
        caplog.at_level("WARNING"),
    ):
        folder = dump(nn.Identity(), "Torch_split_0_backward", lambda: torch.split(data, 2), ["grad.npy"])
    assert "is not of tensor type and cannot be automatically derived" in caplog.text
    assert list(folder.iterdir()) == []


def test_name_that_does_not_occur_is_told_with_the_nearest() -> None:
    write_config()
    net = Net()
    with pytest.warns(
        CaptureIncomplete, match=r"nothing matched 'Functional\.conv2d\.7\.forward'\. Nearest: .*conv2d\.1"
    ):
        dump(net, "Functional_conv2d_7_forward", lambda: step(net))


def test_gradients_that_come_too_late_are_told(caplog: pytest.LogCaptureFixture) -> None:
    write_config()
    net = Net()
    numpy.save("grad.npy", numpy.ones(2, dtype=numpy.float32))

    def action() -> None:
        step(net)
        ptdbg.set_backward_input(["grad.npy"])

    with caplog.at_level(logging.WARNING):
        dump(net, "Functional_conv2d_0_backward", action)
    assert "Functional_conv2d_0_backward: set_backward_input came after the forward of the call" in caplog.text


def test_two_dumps_in_one_second_are_kept_apart() -> None:
    write_config()
    net = Net()
    folders = [dump(net, "Torch_relu_0_forward", lambda: step(net)) for _ in range(2)]
    assert folders[0] != folders[1]
    first, second = (list(read(folder)) for folder in folders)
    assert first == second
    assert "relu_default_0.output.0" in first


def test_ranks_on_one_device_are_kept_apart() -> None:
    write_config()
    dumped = acl.begin(nn.Identity(), "Torch.sin.0.forward", "dump.json", [], rank=3)
    torch.sin(torch.ones(2))
    dumped.stop()
    assert dumped.out.parts[-2:] == ("3", "0")
    assert len(read(dumped.out)) == 2


def test_mode_acl_needs_a_dump_config() -> None:
    ptdbg.set_dump_path("./npu_dump.pkl")
    ptdbg.register_hook(nn.Identity(), ptdbg.acc_cmp_dump)
    with pytest.raises(SettingsError, match=r'mode "acl" needs a dump\.json: register_hook'):
        ptdbg.set_dump_switch("ON", mode="acl", scope=["Tensor_abs_1_forward"])


def test_list_of_models_is_for_npus(caplog: pytest.LogCaptureFixture) -> None:
    write_config(dump_list=[{"model_name": "m"}])
    with caplog.at_level(logging.WARNING):
        dump(nn.Identity(), "Torch_sin_0_forward", lambda: torch.sin(torch.ones(2)))
    assert "dump_list is for NPUs: on cpu every kernel inside the call is dumped." in caplog.text


def test_config_of_the_guide_is_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = write_config(dump_path="/home/HwHiAiUser/dump/output")
    config = acl.read_dump_config(path)
    assert config == (path.absolute(), Path("/home/HwHiAiUser/dump/output"), "all", ())
    write_config(dump_path="output", dump_mode=None, dump_list=None)
    config = acl.read_dump_config("dump.json")
    assert config == (path.absolute(), tmp_path / "output", "output", ())
    assert not acl.device_is_npu(Net())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", r"is not JSON: "),
        ("[]", r'has no object "dump"'),
        ('{"dump": 3}', r'has no object "dump"'),
        ('{"dumps": {}}', r"'dumps' in '.*dump\.json' is not known\. Did you mean 'dump'\?"),
        (
            '{"dump": {"dump_pth": "x"}}',
            r"'dump_pth' in .* is not known\. Did you mean 'dump_path'\? Fields: dump_list",
        ),
        ('{"dump": {"dump_list": "all"}}', r"dump_list in .* is 'all'; it must be a list"),
        ('{"dump": {}}', r"dump_path in .* is missing; it must be the folder"),
        ('{"dump": {"dump_path": ""}}', r"dump_path in .* is ''; it must be the folder"),
        ('{"dump": {"dump_path": 3}}', r"dump_path in .* is 3; it must be the folder"),
        ('{"dump": {"dump_path": "dump.json"}}', r"dump_path in .* which is a file; it must be a folder"),
        (
            '{"dump": {"dump_path": "x", "dump_mode": "outputs"}}',
            r"dump_mode in .* is 'outputs'; it must be one of output, input, all\. Did you mean 'output'\?",
        ),
        ('{"dump": {"dump_path": "x", "dump_mode": ["all"]}}', r"dump_mode in .* is \['all'\]; it must be one of"),
        (
            '{"dump": {"dump_path": "x", "dump_op_switch": true}}',
            r"dump_op_switch in .* is True; it must be one of on, off",
        ),
        (
            '{"dump": {"dump_path": "x", "dump_op_switch": "off"}}',
            r"dump_op_switch in .* is 'off': nothing would be dumped\. Set it to \"on\"",
        ),
        ('{"dump": {"dump_path": "x"}}', r"dump_op_switch in .* is missing, which means off: nothing would be dumped"),
    ],
)
def test_wrong_config_is_refused_before_training(text: str, message: str) -> None:
    Path("dump.json").write_text(text)
    with pytest.raises(SettingsError, match=message) as caught:
        ptdbg.register_hook(nn.Identity(), ptdbg.acc_cmp_dump, dump_mode="acl", dump_config="dump.json")
    assert isinstance(caught.value, UnknownSetting) == ("is not known" in message)


def test_config_that_is_not_there_is_told_with_an_example() -> None:
    with pytest.raises(SettingsError, match=r"'.*/none\.json' cannot be read: No such file.*\n  \{\"dump\": \{"):
        acl.read_dump_config("none.json")
    with pytest.raises(SettingsError, match=r"takes the path of a dump\.json; got 5"):
        acl.read_dump_config(5)  # type: ignore[arg-type]


def test_gradients_must_be_arrays_of_numbers() -> None:
    Path("text.npy").write_text("no array")
    numpy.save("names.npy", numpy.array(["a", "b"]))
    numpy.savez("several.npz", a=numpy.ones(2))
    numpy.save("good.npy", numpy.ones(2))
    for name in ("text.npy", "missing.npy"):
        with pytest.raises(SettingsError, match=f"set_backward_input: '{name}' is not a .npy file that can be read"):
            acl.load_gradients(["good.npy", name])
    for name in ("names.npy", "several.npz"):
        with pytest.raises(SettingsError, match=f"'{name}' does not hold an array of numbers"):
            acl.load_gradients([name])
    (array,) = acl.load_gradients(["good.npy"])
    assert array.tolist() == [1.0, 1.0]
