"""What a script may ask of the device: tensors, modules, random numbers, autocast, files, and honest refusals."""

from __future__ import annotations

import copy
import io
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from tensorprobe import sim
from tensorprobe.errors import SettingsError, UnsupportedTorch


def test_tensors_move_and_compute(npu: str) -> None:
    x = torch.randn(4, 6)
    y = x.to("npu")
    assert y.device == torch.device("npu:0") and y.is_npu
    assert torch.equal(x.npu().cpu(), x)
    assert torch.equal((y @ y.t()).cpu(), x @ x.t())
    assert torch.npu.is_available() and torch.npu.device_count() == 1 and torch.npu.current_device() == 0
    torch.npu.set_device(0)
    torch.npu.synchronize()
    torch.accelerator.synchronize()
    assert torch.accelerator.current_accelerator() == torch.device("npu")


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float16,
        torch.bfloat16,
        torch.float8_e4m3fn,
        torch.float64,
        torch.int8,
        torch.int64,
        torch.bool,
        torch.complex64,
    ],
    ids=str,
)
def test_every_dtype_round_trips(npu: str, dtype: torch.dtype) -> None:
    x = torch.arange(-3, 5).to(dtype)
    y = x.to("npu")
    assert y.dtype == dtype
    assert torch.equal(y.cpu().float() if dtype.itemsize == 1 else y.cpu(), x.float() if dtype.itemsize == 1 else x)


def test_views_and_inplace_ops_share_memory(npu: str) -> None:
    x = torch.zeros(4, 6, device="npu")
    x[1:3, ::2].add_(1)
    x.t()[5].fill_(7)
    expected = torch.zeros(4, 6)
    expected[1:3, ::2].add_(1)
    expected.t()[5].fill_(7)
    assert torch.equal(x.cpu(), expected)
    assert x.view(-1).data_ptr() == x.data_ptr()


def test_lazily_conjugated_and_empty_tensors(npu: str) -> None:
    x = torch.randn(3, 4, dtype=torch.complex64)
    y = x.to("npu").conj()
    assert torch.equal(y.cpu(), x.conj())
    assert torch.equal(y.imag.cpu(), x.conj().imag)
    torch.testing.assert_close(torch.fft.hfft(torch.fft.fft(y)).cpu(), torch.fft.hfft(torch.fft.fft(x.conj())))
    assert torch.empty(0, 3, device="npu").sum().item() == 0


def test_out_tensors_are_resized(npu: str) -> None:
    out = torch.empty(0, device="npu")
    x = torch.ones(3, 4, device="npu")
    torch.add(x, x, out=out)
    assert out.shape == (3, 4) and out.sum().item() == 24
    assert x.resize_(2, 2).shape == (2, 2)
    assert x.resize_(5, 5).flatten()[:4].sum().item() == 4


def test_tensors_are_made_from_numbers_under_a_dispatch_mode(npu: str) -> None:
    class PassesThrough(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            return func(*args, **(kwargs or {}))

    with PassesThrough():
        made = [torch.tensor(numbers, device="npu") for numbers in ([], [1.0, 2.0], 3)]
    assert [one.tolist() for one in made] == [[], [1.0, 2.0], 3]


def test_random_stream_is_the_device_s_own(npu: str) -> None:
    torch.manual_seed(3)
    first = torch.randn(5, device="npu")
    host = torch.randn(5)
    torch.manual_seed(3)
    assert torch.equal(torch.randn(5), host), "drawing on the device moved the host's stream"
    torch.npu.manual_seed(3)
    assert torch.equal(torch.randn(5, device="npu"), first)
    state = torch.npu.get_rng_state()
    dropped = nn.functional.dropout(torch.ones(100, device="npu"))
    torch.npu.set_rng_state(state)
    assert torch.equal(nn.functional.dropout(torch.ones(100, device="npu")), dropped)
    assert 0 < (dropped == 0).sum().item() < 100


def test_backward_runs_in_a_thread_of_the_device(npu: str) -> None:
    seen: list[int] = []

    class Probe(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            seen.append(threading.get_ident())
            return grad * 2

    x = torch.ones(3, device="npu", requires_grad=True)
    Probe.apply(x).sum().backward()
    assert x.grad.device.type == "npu" and x.grad.sum().item() == 6
    assert seen and seen[0] != threading.get_ident()


HOOKS = {
    "tensor": "y.register_hook(boom)",
    "leaf": "x.register_hook(boom)",
    "accumulate": "x.register_post_accumulate_grad_hook(boom)",
    "node": "y.grad_fn.register_hook(boom)",
    "callback": "y.register_hook(lambda g: torch.autograd.Variable._execution_engine.queue_callback(boom))",
}


@pytest.mark.usefixtures("warm_processes")
def test_an_exception_in_a_hook_reaches_the_caller_of_backward() -> None:
    """In a process of its own: a guard in Python that is asked while an exception is pending aborts the process."""
    body = "\n".join(
        f"""
x = torch.ones(3, device='npu', requires_grad=True); y = x * 2; {hook}
try: y.sum().backward()
except ValueError as error: print('{name}', error)
"""
        for name, hook in HOOKS.items()
    )
    script = f"import torch\nfrom tensorprobe import sim\nsim.enable()\ndef boom(*_): raise ValueError('boom')\n{body}"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout.splitlines() == [f"{name} boom" for name in HOOKS], done.stderr


def test_save_load_deepcopy(npu: str) -> None:
    model = nn.Linear(4, 3).to("npu")
    twin = copy.deepcopy(model)
    assert twin.weight.device.type == "npu" and twin.weight.data_ptr() != model.weight.data_ptr()
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    for where, device in ((None, "npu"), ("cpu", "cpu"), ("npu", "npu")):
        buffer.seek(0)
        state = torch.load(buffer, weights_only=True, map_location=where)
        assert state["weight"].device.type == device
        assert torch.equal(state["weight"].cpu(), model.weight.detach().cpu())


def test_moving_a_module_keeps_its_parameters(npu: str) -> None:
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    model[1].weight = model[0].weight
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    held = model[0].weight
    model.to("npu")
    assert model[0].weight is model[1].weight is held and held.is_npu
    model(torch.ones(1, 3, device="npu")).sum().backward()
    before = held.detach().clone()
    optimizer.step()
    assert not torch.equal(model[0].weight, before), "the optimizer still steps the model's own parameter"
    optimizer.zero_grad()
    assert model.cpu()[0].weight is held and held.is_cpu
    assert model.npu().half()[1].weight is held and held.dtype == torch.float16
    assert not torch.__future__.get_swap_module_params_on_conversion()


def test_a_module_held_by_a_graph_still_moves(npu: str) -> None:
    model = nn.Linear(3, 3)
    loss = model(torch.ones(1, 3)).sum()
    assert model.to("npu").weight.is_npu
    assert loss.requires_grad


def test_autocast_and_grad_scaler(npu: str) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 1)).to("npu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("npu", init_scale=2.0**8)
    before = model[0].weight.detach().clone()
    x = torch.randn(4, 8, device="npu")
    with torch.autocast("npu", dtype=torch.bfloat16):
        assert (x @ x.t()).dtype == torch.bfloat16
        assert torch.softmax(x.bfloat16(), -1).dtype == torch.float32
    with torch.autocast("npu", dtype=torch.float16):
        assert model[0](x).dtype == torch.float16
        loss = model(x).float().pow(2).mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    assert not torch.equal(model[0].weight, before)
    model[0].weight.grad.fill_(torch.inf)
    kept = model[0].weight.detach().clone()
    scaler.scale(model(x).float().sum())
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(model[0].weight, kept) and scaler.get_scale() == 2.0**7


def test_host_autocast_does_not_leak_into_the_device(npu: str) -> None:
    x = torch.randn(4, 4, device="npu")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        product = x @ x
    assert product.dtype == torch.float32
    assert torch.equal(product.cpu(), x.cpu() @ x.cpu())


def test_integers_are_counted_as_on_accelerators(npu: str) -> None:
    assert torch.histc(torch.tensor([0, 1, 1, 3], device=npu).int(), bins=4, min=0, max=3).tolist() == [1, 2, 0, 1]


def test_checkpointing_and_vmap(npu: str) -> None:
    from torch.utils.checkpoint import checkpoint

    layer = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 4)).to("npu")
    x = torch.randn(2, 4, device="npu", requires_grad=True)
    torch.npu.manual_seed(1)
    plain = torch.autograd.grad(layer(x).sum(), x)[0]
    torch.npu.manual_seed(1)
    again = torch.autograd.grad(checkpoint(layer, x, use_reentrant=False).sum(), x)[0]
    assert torch.equal(plain, again)
    assert torch.equal(torch.func.vmap(torch.sum)(x), x.sum(1))


def test_tensors_stay_on_the_card_that_the_program_names(npu: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = nn.Linear(4, 4).to("npu:1")
    optimizer = torch.optim.AdamW(layer.parameters())
    x = torch.ones(2, 4, device="npu:1")
    assert x.to("npu:1") is x and x.to("npu:2").device.index == 2 and torch.cat([x, x]).device == x.device
    layer(x).sum().backward()
    optimizer.step()
    assert {parameter.grad.device.index for parameter in layer.parameters() if parameter.grad is not None} == {1}
    assert copy.deepcopy(layer).weight.device.index == 1
    with torch.npu.device(3):
        assert torch.npu.current_device() == 3 and torch.npu.device_count() == 4
        assert (
            x.to("npu").device.index
            == torch.rand(2, device="npu").device.index
            == torch.ones(1).npu().device.index
            == 3
        )
    assert torch.npu.current_device() == 0
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert torch.npu.device_count() == 8


REFUSALS = [
    ("torch.ones(2).to('npu:16')", RuntimeError, "16 devices, 'npu:0' to 'npu:15'"),
    ("torch.npu.set_device(16)", RuntimeError, "16 devices, 'npu:0' to 'npu:15'"),
    ("torch.ones(3, device='npu:1') + torch.ones(3, device='npu:2')", RuntimeError, "on npu:1 and on npu:2"),
    ("torch.ones(2, device='npu').pin_memory()", RuntimeError, "only dense CPU tensors can be pinned"),
    ("torch.ones(2).pin_memory()", NotImplementedError, "pinned memory"),
    ("torch.ones(2, 2, device='npu').to_sparse()", NotImplementedError, "sparse"),
    ("torch.sparse_coo_tensor([[0], [1]], [1.0], (2, 2), device='npu')", NotImplementedError, "sparse"),
    ("torch.nested.nested_tensor([torch.ones(2)], device='npu') * 2", NotImplementedError, "nested"),
    ("torch.quantize_per_tensor(torch.ones(2, device='npu'), 0.1, 0, torch.qint8)", NotImplementedError, "quantized"),
    ("torch.ones(2, device='npu').untyped_storage().resize_(0)", NotImplementedError, "FSDP2"),
    ("torch.ones(3, device='npu') + torch.ones(3)", RuntimeError, "same device"),
]


@pytest.mark.parametrize(("expression", "error", "message"), REFUSALS, ids=[row[0] for row in REFUSALS])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:torch.quantize_per_tensor:UserWarning")
def test_what_it_cannot_do_it_says(npu: str, expression: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        eval(expression)


@pytest.mark.usefixtures("warm_processes")
def test_fsdp2_and_pinning_loaders_are_refused_by_name(tmp_path: Path) -> None:
    script = f"""
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader
from tensorprobe import sim
sim.enable()
dist.init_process_group('hccl', init_method='file://{tmp_path}/store', rank=0, world_size=1)
try: fully_shard(torch.nn.Linear(4, 4).npu(), mesh=init_device_mesh('npu', (1,)))(torch.ones(2, 4).npu()).sum().backward()
except NotImplementedError as error: print(error)
try: list(DataLoader(torch.ones(4), pin_memory=True))
except NotImplementedError as error: print(error)
dist.destroy_process_group()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    sharded, pinned = done.stdout.splitlines()
    assert "fully_shard / FSDP2" in sharded and "no pinned memory" in pinned


def test_storages_can_be_made_on_the_device(npu: str) -> None:
    storage = torch.UntypedStorage(8, device="npu")
    assert storage.device.type == "npu" and storage.nbytes() == 8


def test_enabling_again_is_harmless_and_renaming_refused(npu: str) -> None:
    sim.enable("npu")
    with pytest.raises(SettingsError, match="already called 'npu'"):
        sim.enable("xdna")


def test_a_torch_without_the_hooks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from tensorprobe import torch_names
    from tensorprobe.sim import device

    monkeypatch.setattr(torch_names, "setup_python_backend", None)
    with pytest.raises(
        UnsupportedTorch,
        match=rf"needs torch {torch_names.SIMULATED_SINCE} .* this is {torch.__version__.split('+')[0]}",
    ):
        device._check_torch()


@pytest.mark.usefixtures("warm_processes")
def test_enabling_after_the_first_backward_is_one_clear_error() -> None:
    code = (
        "import torch; torch.ones(1, requires_grad=True).sum().backward()\n"
        "from tensorprobe import sim\n"
        "try: sim.enable()\n"
        "except Exception as error: print(type(error).__name__, error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "SettingsError the device 'npu' was enabled after the first backward" in done.stdout, done.stderr
