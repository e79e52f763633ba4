"""The stand-in for torch_npu: ops of the older tools' list, the overflow flag, the dump calls."""

from __future__ import annotations

import importlib
import importlib.util

import pytest
import torch
from torch.nn import functional as F

from tensorprobe import sim
from tensorprobe.errors import SettingsError
from tensorprobe.sim import npu_module as stand_in
from tensorprobe.sim import npu_ops


@pytest.fixture
def torch_npu(npu: str):
    return importlib.import_module("torch_npu")


CALLS = {
    "fast_gelu": lambda f, x: f(x),
    "npu_mish": lambda f, x: f(x),
    "npu_linear": lambda f, x: f(x, x[:3], x[0, :3]),
    "npu_bmmV2": lambda f, x: f(x[None], x.t()[None], [4, 4]),
    "npu_transpose": lambda f, x: f(x, [1, 0]),
    "npu_broadcast": lambda f, x: f(x[:1], [3, 6]),
    "npu_dtype_cast": lambda f, x: f(x, torch.float16),
    "npu_one_hot": lambda f, x: f((x > 0).int(), 3),
    "npu_pad": lambda f, x: f(x, [1, 0, 2, 3]),
    "npu_slice": lambda f, x: f(x, [1, 2], [2, 3]),
    "npu_indexing": lambda f, x: f(x, [0, 1], [4, 6], [2, 1]),
    "npu_confusion_transpose": lambda f, x: f(x, [1, 0], [3, 8], True),
    "npu_max": lambda f, x: f(x, 1),
    "npu_scatter": lambda f, x: f(x, torch.zeros(6, dtype=torch.int32, device=x.device), x[0], 0),
    "npu_layer_norm_eval": lambda f, x: f(x, [6]),
    "npu_iou": lambda f, x: f(x[:, :4].abs().cumsum(1), x[:2, :4].abs().cumsum(1)),
    "npu_sign_bits_pack": lambda f, x: f(x.flatten(), 1),
    "npu_sign_bits_unpack": lambda f, x: f((x.abs() * 50).to(torch.uint8).flatten(), 2, torch.float32),
    "npu_scaled_masked_softmax": lambda f, x: f(x, x > 0, 0.5),
    "npu_rms_norm": lambda f, x: f(x, x[0]),
    "npu_rotary_mul": lambda f, x: f(x, x.cos(), x.sin()),
    "npu_swiglu": lambda f, x: f(x),
    "npu_fusion_attention": lambda f, x: f(x[None], x[None], x[None], 2, "BSH", scale=0.5),
}


@pytest.mark.parametrize("name", [body.__name__ for body in npu_ops._SCHEMAS])
def test_ops_agree_with_their_definition_on_both_devices(torch_npu, name: str) -> None:
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    expected = CALLS[name](getattr(npu_ops, name), x)
    actual = CALLS[name](getattr(torch_npu, name), x.to("npu"))
    for wanted, got in zip(_tuple(expected), _tuple(actual), strict=True):
        assert got.device.type == "npu"
        torch.testing.assert_close(got.cpu(), wanted)


def test_bits_pack_and_unpack_are_inverse(torch_npu) -> None:
    x = torch.randn(16).npu()
    packed = torch_npu.npu_sign_bits_pack(x, 1)
    assert packed.dtype == torch.uint8 and packed.shape == (1, 2)
    assert torch.equal(torch_npu.npu_sign_bits_unpack(packed, 1, torch.float32).flatten().cpu(), x.cpu().sign())


def test_fused_attention_is_attention(torch_npu) -> None:
    q, k, v = (torch.randn(2, 5, 3, 4, generator=torch.Generator().manual_seed(n)) for n in range(3))
    hidden = torch.ones(5, 5, dtype=torch.bool).triu(1)
    expected = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), is_causal=True).transpose(1, 2)
    out, *_ = torch_npu.npu_fusion_attention(q.npu(), k.npu(), v.npu(), 3, "BSND", atten_mask=hidden.npu(), scale=0.5)
    torch.testing.assert_close(out.cpu(), expected)
    with pytest.raises(NotImplementedError, match="not 'TND'"):
        torch_npu.npu_fusion_attention(q.npu(), k.npu(), v.npu(), 3, "TND")


def test_gradients_flow_through_the_ops(torch_npu) -> None:
    x = torch.randn(4, 6)
    device_x = x.npu().requires_grad_()
    torch_npu.npu_linear(torch_npu.fast_gelu(device_x), device_x[:2], None).sum().backward()
    x.requires_grad_()
    F.linear(x * torch.sigmoid(1.702 * x), x[:2]).sum().backward()
    torch.testing.assert_close(device_x.grad.cpu(), x.grad)


def test_ops_can_be_made_faulty_by_name(torch_npu) -> None:
    x = torch.ones(3, device="npu")
    with sim.fault("npu::fast_gelu", "scale", factor=2.0):
        wrong = torch_npu.fast_gelu(x)
    assert torch.equal(wrong, torch_npu.fast_gelu(x) * 2)


def test_overflow_flag_is_raised_by_finite_inputs_only(torch_npu) -> None:
    status = torch_npu.npu_alloc_float_status(torch.empty(0))
    torch_npu.npu_clear_float_status(status)
    big = torch.full((3,), 6e4, dtype=torch.float16, device="npu")
    masked = big.masked_fill(big > 0, -torch.inf)
    torch.softmax(torch.cat([masked, big]), 0)
    assert not torch_npu._C._check_overflow_npu()
    _ = big + big
    assert torch_npu._C._check_overflow_npu() and torch_npu.npu.utils.get_npu_overflow_flag()
    assert torch_npu.npu_get_float_status(status)[0].item() == 1
    torch_npu._C._clear_overflow_npu()
    assert torch_npu.npu_get_float_status(status)[0].item() == 0
    assert torch_npu.npu.npu_check_overflow(big + big) and not torch_npu.npu.npu_check_overflow(big)
    torch_npu._C._clear_overflow_npu()


def test_dump_calls_are_remembered(torch_npu) -> None:
    stand_in.dump_calls.clear()
    torch_npu.npu.init_dump()
    torch_npu.npu.set_dump("dump.json")
    torch_npu.npu.finalize_dump()
    assert stand_in.dump_calls == [("init_dump",), ("set_dump", "dump.json"), ("finalize_dump",)]


def test_it_is_found_like_a_package(torch_npu) -> None:
    assert importlib.util.find_spec("torch_npu") is not None
    assert torch_npu.npu is torch.npu and torch_npu.npu.is_available()
    assert stand_in.install("npu") is torch_npu
    with pytest.raises(SettingsError, match="needs the device to be called 'npu'"):
        stand_in.install("xpu2")


def _tuple(value):
    return value if isinstance(value, tuple) else (value,)
