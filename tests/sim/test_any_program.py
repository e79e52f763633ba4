"""The catalog's faults by name, on a program that none of them was made for; and what is said of a fault that changed nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tensorprobe import sim
from tensorprobe.sim.known_faults import ENTRIES, named_fault
from tests.sim.test_cli import PROGRAM

NAMES = [entry.name for entry in ENTRIES if entry.model != "parallel"]


class Foreign(nn.Module):
    """One layer of each kind, with other names, shapes and numbers of calls than the models of the catalog have."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.mix, self.out = nn.Embedding(7, 6), nn.Linear(6, 6), nn.Linear(6, 5, bias=False)
        self.norm, self.groups, self.batch = nn.LayerNorm(6), nn.GroupNorm(1, 4), nn.BatchNorm2d(4)
        self.conv, self.cell = nn.Conv2d(4, 4, 3, padding=1, groups=2), nn.LSTMCell(6, 6)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.norm(self.mix(self.table(ids)))
        scores = (x @ x.transpose(-2, -1)).masked_fill(torch.eye(3, dtype=torch.bool, device=x.device), -1e9)
        x = x + F.gelu(F.softmax(scores, -1) @ x).reshape(x.shape)
        image = F.relu(
            self.batch(F.silu(self.groups(self.conv(x.reshape(2, 1, 3, 6).expand(2, 4, 3, 6).contiguous()))))
        )
        x = x + F.max_pool2d(image, 2).mean((1, 2, 3)).view(2, 1, 1)
        h = self.cell(x[:, 0], self.cell(x[:, 1]))[0]
        place = torch.tensor([[0, 1, 2, 0, 1, 2]] * 2, device=x.device)
        h = h + h.gather(1, place) + torch.zeros_like(h).scatter_add(1, place, h) + h.cumsum(0)
        h = h + torch.zeros_like(h).index_add(0, torch.tensor([1, 0], device=x.device), h) + h.topk(2)[0].sum(-1, True)
        return self.out(h / torch.linalg.vector_norm(h, dim=-1, keepdim=True))


def train(device: str, *, steps: int = 4) -> None:
    torch.manual_seed(0)
    model = Foreign().to(device)
    optimizers = [torch.optim.AdamW(model.parameters(), 1e-2), torch.optim.SGD(model.parameters(), 1e-2, momentum=0.9)]
    ids, wanted = torch.tensor([[1, 2, 3], [4, 5, 6]], device=device), torch.tensor([1, 2], device=device)
    for _ in range(steps):
        with torch.autocast(device, torch.bfloat16):
            F.linear(torch.ones(3, 6, device=device), model.mix.weight, model.mix.bias)
            (torch.ones(2, 3, 3, device=device) @ torch.ones(2, 3, 3, device=device)).sum()
        logits = model(ids)
        loss = F.cross_entropy(logits, wanted) + F.mse_loss(logits, torch.ones_like(logits))
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("name", NAMES)
def test_a_fault_of_the_catalog_strikes_a_program_it_was_not_made_for(npu: str, name: str) -> None:
    with sim.installed([named_fault(name)]) as (handle,):
        if handle.fault.kind == "error":
            with pytest.raises(RuntimeError, match="simulated device error"):
                train(npu)
            assert handle.fired
        else:
            train(npu)
            assert handle.changed, handle.silence()
    assert handle.silence() is None or handle.fault.kind == "error"


def test_linear_layers_without_bias_are_struck_too(npu: str) -> None:
    model, x = nn.Linear(4, 4, bias=False).to(npu), torch.ones(2, 4, device=npu)
    with sim.installed([named_fault("linear-scale")]) as (handle,):
        right, wrong = model(x), model(x)
    assert handle.changed == 1 and torch.equal(wrong.cpu(), (right * 1.001).cpu())


def test_the_exact_fault_of_the_catalog_waits_for_its_own_model(npu: str) -> None:
    exact = next(entry.fault for entry in ENTRIES if entry.name == "linear-scale")
    with sim.installed([exact]) as (handle,):
        train(npu)
    assert (handle.fired, handle.seen) == (0, 0) and handle.met
    assert handle.silence() == (
        f"fault aten::addmm matched 0 of {handle.met} calls of aten::addmm. It waits for every addmm in module blocks.1.attn.qkv."
    )


def test_reasons_for_silence(npu: str) -> None:
    layer, x = nn.LayerNorm(4).to(npu), torch.ones(2, 4, device=npu)

    def reason(**fault: object) -> str | None:
        with sim.installed([sim.make_fault(**fault)]) as (handle,):
            layer(x)
        return handle.silence()

    norm = {"op": "aten::native_layer_norm", "kind": "bias", "name": "shifted"}
    assert reason(**norm) is None
    assert reason(**norm, rank=1) is None
    assert reason(**{**norm, "op": "aten::gelu"}) == (
        "fault shifted matched 0 calls: the program did not run aten::gelu on the device."
    )
    assert reason(**norm, nth=2) == (
        "fault shifted struck 0 of 1 matching calls. It waits for the 3rd native_layer_norm."
    )
    assert reason(**norm, dtype="bfloat16") == (
        "fault shifted matched 0 of 1 calls of aten::native_layer_norm. "
        "It waits for every native_layer_norm of dtype bfloat16."
    )
    assert reason(**{**norm, "amount": 0.0}) == "fault shifted struck 1 calls, and none of their results changed."


SCRIPT = """
import sys, torch
layer = torch.nn.LayerNorm(4).to(sys.argv[1])
print(float(layer(torch.ones(2, 4, device=sys.argv[1])).sum()))
"""


@pytest.mark.usefixtures("warm_processes")
@pytest.mark.parametrize(
    ("device", "told"),
    [
        ("npu", "fault gelu-truncated matched 0 calls: the program did not run aten::gelu on the device."),
        ("cpu", "no fault could strike: the program ran nothing on the simulated device. Does it select that device?"),
    ],
)
def test_the_end_of_a_program_names_faults_that_changed_nothing(tmp_path: Path, device: str, told: str) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [
        *PROGRAM,
        "sim",
        "--fault",
        "gelu-truncated,layer-norm-gradient",
        "--",
        sys.executable,
        "script.py",
        device,
    ]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=os.environ | {"RANK": "0"})
    assert done.returncode == 0 and f"tensorprobe: {told}" in done.stderr
    none = subprocess.run(
        [*PROGRAM, "sim", "--fault", "gelu-truncated", "--", sys.executable, "-c", "import torch"],
        capture_output=True, text=True,
    )  # fmt: skip
    assert (none.returncode, none.stderr) == (0, "")
