"""Kernel and twin give the same bits, and those are the true figures."""

from __future__ import annotations

import ctypes
import importlib.machinery
import importlib.util
import math
import struct
import subprocess
import sysconfig
from array import array
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from tensorprobe.model import DTYPES
from tensorprobe.numerics import native, twin
from tests.builders.dtypes import KNOWN_DTYPES

from .oracle import assert_figures, cases, make_bytes, placed, tame_bytes, values_of

SOURCE = Path(native.__file__).with_name("_native.c")
FLOAT32, FLOAT64 = DTYPES["float32"], DTYPES["float64"]


def built_kernel() -> ModuleType:
    module = native.kernel()
    assert module is not None, "the extension is not built: pip install -e . (needs a C compiler)"
    return module


@pytest.fixture(scope="session")
def portable(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    """The C code as it is built for a processor of which it knows nothing."""
    target = tmp_path_factory.mktemp("portable") / "_native.so"
    command = ["cc", "-O1", "-shared", "-fPIC", "-ffp-contract=off", "-DPy_LIMITED_API=0x030A0000"]
    command += ["-DTENSORPROBE_PORTABLE", f"-I{sysconfig.get_path('include')}", str(SOURCE), "-o", str(target), "-lm"]
    subprocess.run(command, check=True)
    loader = importlib.machinery.ExtensionFileLoader("_native", str(target))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("_native", loader))
    loader.exec_module(module)
    assert module.features() == ()
    return module


@pytest.fixture(params=["kernel", "portable", "twin"])
def module(request: pytest.FixtureRequest) -> ModuleType:
    if request.param == "portable":
        return request.getfixturevalue("portable")
    return twin if request.param == "twin" else built_kernel()


@settings(max_examples=600, deadline=None)
@given(case=cases)
def test_kernel_twin_and_portable_code_agree_bit_for_bit_and_with_the_oracle(portable: ModuleType, case) -> None:
    dtype, count, flavour, seed, offset = case
    content = make_bytes(dtype, count, flavour, seed)
    with placed(content, offset) as address:
        figures = built_kernel().summarize(address, count, dtype.code)
        assert repr(figures) == repr(twin.summarize(address, count, dtype.code))
        assert repr(figures) == repr(portable.summarize(address, count, dtype.code))
    assert_figures(figures, values_of(content, dtype))


@pytest.mark.parametrize("count", [65535, 65536, 65537, 200_003])
@pytest.mark.parametrize("name", ["float32", "bfloat16", "float64", "int16"])
def test_tensors_of_many_blocks_agree_too(name: str, count: int, module: ModuleType) -> None:
    dtype = DTYPES[name]
    content = make_bytes(dtype, count, "special", count)
    with placed(content, 1) as address:
        figures = module.summarize(address, count, dtype.code)
        assert repr(figures) == repr(built_kernel().summarize(address, count, dtype.code))
    assert_figures(figures, values_of(content, dtype))


@pytest.mark.parametrize("name", [name for name in KNOWN_DTYPES if name.startswith("float8")])
def test_every_byte_of_the_8_bit_floats_is_read_as_torch_reads_it(name: str, module: ModuleType) -> None:
    dtype = DTYPES[name]
    for byte in range(256):
        with placed(bytes([byte])) as address:
            assert_figures(module.summarize(address, 1, dtype.code), values_of(bytes([byte]), dtype))


@pytest.mark.parametrize("name", ["bfloat16", "float16"])
def test_every_16_bit_float_is_read_as_torch_reads_it(name: str, module: ModuleType) -> None:
    dtype = DTYPES[name]
    content = np.arange(65536, dtype="<u2").tobytes()
    values = values_of(content, dtype)
    with placed(content) as address:
        for start in range(0, 65536, 512):
            figures = module.summarize(address + 2 * start, 512, dtype.code)
            assert_figures(figures, values[start : start + 512])


@pytest.mark.parametrize("magnitude", [1e308, 1e200, 1e-170, 1e-308, 5e-324])
@pytest.mark.parametrize("name", ["float64", "complex128"])
@pytest.mark.parametrize("count", [3, 40, 5000])
def test_norm_and_mean_survive_squares_that_overflow_or_vanish(
    magnitude: float, name: str, count: int, module: ModuleType
) -> None:
    dtype = DTYPES[name]
    values = [magnitude * (0.5 + 0.5 * (i % 3)) for i in range(count)]
    content = tame_bytes(dtype, values)
    with placed(content) as address:
        figures = module.summarize(address, count, dtype.code)
    assert_figures(figures, values_of(content, dtype))
    assert figures[3] > 0


def test_overflowing_squares_beside_infinity_and_nan(module: ModuleType) -> None:
    content = struct.pack("<5d", 3e200, math.inf, -4e200, math.nan, 0.0)
    with placed(content) as address:
        high, low, mean, norm, nan, inf = module.summarize(address, 5, FLOAT64.code)
    assert (high, low, nan, inf) == (math.inf, -4e200, 1, 1)
    assert norm == pytest.approx(5e200, rel=1e-14)
    assert mean == pytest.approx(-1e200 / 3, rel=1e-14)


def test_opposite_huge_values_cancel_in_the_mean(module: ModuleType) -> None:
    with placed(struct.pack("<4d", 1.7e308, 1.7e308, -1.7e308, -1.7e308) * 16) as address:
        assert module.summarize(address, 64, FLOAT64.code)[2] == 0.0


@pytest.mark.parametrize("fill", [math.nan, math.inf, -math.inf])
def test_tensor_without_a_finite_element(fill: float, module: ModuleType) -> None:
    with placed(struct.pack("<100f", *[fill] * 100)) as address:
        figures = module.summarize(address, 100, FLOAT32.code)
    assert_figures(figures, [fill] * 100)


def test_empty_tensor_has_nan_and_no_counts_and_needs_no_address(module: ModuleType) -> None:
    for dtype in KNOWN_DTYPES.values():
        figures = module.summarize(0, 0, dtype.code)
        assert repr(figures) == "(nan, nan, nan, nan, 0, 0)"


def test_negative_zero_is_reported_as_zero(module: ModuleType) -> None:
    for count in (1, 16, 40, 2048):
        with placed(struct.pack("<f", -0.0) * count) as address:
            assert repr(module.summarize(address, count, FLOAT32.code)) == "(0.0, 0.0, 0.0, 0.0, 0, 0)"


def test_any_byte_but_zero_is_true(module: ModuleType) -> None:
    with placed(bytes([0, 1, 2, 255])) as address:
        assert module.summarize(address, 4, DTYPES["bool"].code) == (1.0, 0.0, 0.75, math.sqrt(3), 0, 0)


def test_extremes_of_64_bit_integers(module: ModuleType) -> None:
    with placed(struct.pack("<2q", -(2**63), 2**63 - 1)) as address:
        assert module.summarize(address, 2, DTYPES["int64"].code)[:2] == (2.0**63, -(2.0**63))
    with placed(struct.pack("<2Q", 0, 2**64 - 1)) as address:
        assert module.summarize(address, 2, DTYPES["uint64"].code)[:2] == (2.0**64, 0.0)


def test_float32_sums_do_not_lose_digits(module: ModuleType) -> None:
    count = 3_000_000
    content = array("f", [0.1]) * count
    figures = module.summarize(content.buffer_info()[0], count, FLOAT32.code)
    assert figures[2] == pytest.approx(content[0], rel=1e-13)
    assert figures[3] == pytest.approx(content[0] * math.sqrt(count), rel=1e-13)


def test_subnormals_count_although_the_thread_flushes_them_to_zero() -> None:
    with placed(struct.pack("<I", 1) * 20 + struct.pack("<H", 1) * 20) as address:
        wanted = twin.summarize(address, 20, FLOAT32.code), twin.summarize(address + 80, 20, DTYPES["float16"].code)
        flushes = torch.set_flush_denormal(True)
        try:
            found = built_kernel().summarize(address, 20, 0), built_kernel().summarize(address + 80, 20, 3)
            still_flushing = float(np.float32(1e-38) * np.float32(0.01)) == 0.0
        finally:
            torch.set_flush_denormal(False)
    assert repr(found) == repr(wanted)
    assert still_flushing == flushes


def test_a_batch_equals_its_tensors_one_by_one(module: ModuleType) -> None:
    contents = [
        (dtype, make_bytes(dtype, count, "special", count)) for dtype in KNOWN_DTYPES.values() for count in (0, 5, 70)
    ]
    kept = [ctypes.create_string_buffer(content, len(content) + 1) for _, content in contents]
    rows = [
        (ctypes.addressof(place), len(content) // dtype.itemsize, dtype.code)
        for place, (dtype, content) in zip(kept, contents, strict=True)
    ]
    table = array("q", [number for row in rows for number in row])
    out = ctypes.create_string_buffer(48 * len(rows))
    assert module.summarize_many(table.buffer_info()[0], len(rows), ctypes.addressof(out)) is None
    assert repr(list(struct.iter_unpack("4d2q", out.raw))) == repr([module.summarize(*row) for row in rows])


@pytest.mark.parametrize("size", [0, 1, 1000, 65535, 65536, 300_000])
def test_copy_copies(size: int, module: ModuleType) -> None:
    content = make_bytes(DTYPES["uint8"], size, "noise", size)
    target = ctypes.create_string_buffer(size + 2)
    with placed(content, 3) as address:
        module.copy(ctypes.addressof(target) + 1, address, size)
    assert target.raw == b"\0" + content + b"\0"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((64, -1, 0), "impossible number of elements: -1"),
        ((64, 2**60, 0), "impossible number of elements: 1152921504606846976"),
        ((64, 1, 21), "unknown dtype code: 21"),
        ((64, 1, -1), "unknown dtype code: -1"),
        ((0, 1, 0), "null address for 1 elements"),
        ((-8, 3, 0), "null address for 3 elements"),
    ],
)
def test_bad_arguments_are_refused(arguments: tuple[int, int, int], message: str, module: ModuleType) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        module.summarize(*arguments)
    rows, out = array("q", (0, 0, 0, *arguments)), array("d", [7.0] * 12)
    with pytest.raises(ValueError, match=f"^row 1: {message}$"):
        module.summarize_many(rows.buffer_info()[0], 2, out.buffer_info()[0])
    assert set(out) == {7.0}, "a refused batch writes nothing"


def test_bad_addresses_and_sizes_are_refused(module: ModuleType) -> None:
    with pytest.raises(ValueError, match="negative number of rows: -1"):
        module.summarize_many(64, -1, 64)
    for addresses in ((0, 64), (64, 0), (-1, 64)):
        with pytest.raises(ValueError, match="null address"):
            module.summarize_many(addresses[0], 1, addresses[1])
        with pytest.raises(ValueError, match="null address"):
            module.copy(addresses[0], addresses[1], 1)
    with pytest.raises(ValueError, match="negative number of bytes: -5"):
        module.copy(64, 64, -5)
    assert module.summarize_many(0, 0, 0) is None
    assert module.copy(0, 0, 0) is None


def test_kernel_refuses_what_is_no_integer_or_too_large() -> None:
    kernel = built_kernel()
    with pytest.raises(TypeError, match="expected 3 integers, got 2 arguments"):
        kernel.summarize(1, 2)
    with pytest.raises(TypeError):
        kernel.summarize("64", 1, 0)
    with pytest.raises(ValueError, match="integer out of range"):
        kernel.summarize(2**70, 1, 0)
