"""Values from .npy files: what numpy has written is what is read, whatever its order, width or size; what is not sound is refused."""

from __future__ import annotations

import ctypes
import gc
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tensorprobe.errors import RunDamaged, TensorDamaged
from tensorprobe.legacy.layouts.npy import SMALL, NpySource
from tensorprobe.legacy.layouts.value_files import ARENA_BYTES, FolderFiles
from tensorprobe.model import DTYPES, Slot
from tensorprobe.numerics.float8 import NAMES as FLOAT8
from tensorprobe.record.elements import to_numpy, to_torch

PLAIN = (
    "float32 float64 float16 int8 uint8 int16 uint16 int32 uint32 int64 uint64 bool complex64 complex128"
).split()  # fmt: skip


def slot(array: Any, dtype: str | None = None, number: int = 0) -> Slot:
    held = np.asarray(array)
    name = dtype or str(held.dtype)
    return Slot(name="input.0", dtype=name, shape=held.shape, offset=number, nbytes=held.size * DTYPES[name].itemsize)


def source(folder: Path) -> NpySource:
    return NpySource(FolderFiles(folder.parent, (folder.name,)), lambda number: f"{number}.npy")


def save(folder: Path, array: Any, number: int = 0) -> NpySource:
    folder.mkdir(exist_ok=True)
    np.save(folder / f"{number}.npy", array)
    return source(folder)


def held_bytes(npy: NpySource, described: Slot) -> bytes:
    address, keep = npy.hold(described)
    content = ctypes.string_at(address, described.nbytes)
    del keep
    return content


def sample(dtype: str, shape: tuple[int, ...]) -> Any:
    numbers = np.arange(int(np.prod(shape)), dtype=np.float64).reshape(shape) % 100
    return (numbers % 2 > 0) if dtype == "bool" else numbers.astype(dtype)


@pytest.mark.parametrize("dtype", PLAIN)
@pytest.mark.parametrize("shape", [(), (3,), (2, 3, 4), (0, 5), (SMALL // 8 + 1,)])
def test_what_numpy_saved_is_read(dtype: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    array = sample(dtype, shape)
    npy = save(tmp_path / "d", array)
    described = slot(array)
    assert bytes(npy.read(described)) == array.tobytes() == held_bytes(npy, described)
    np.testing.assert_array_equal(to_numpy(npy.read(described), described), array)


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("fortran", [False, True])
@pytest.mark.parametrize("shape", [(3, 4, 5), (300, 1000)])
def test_order_of_bytes_and_of_dimensions_is_put_right(
    order: str, fortran: bool, shape: tuple[int, ...], tmp_path: Path
) -> None:
    array = np.random.default_rng(0).standard_normal(shape).astype(f"{order}f4")
    npy = save(tmp_path / "d", np.asfortranarray(array) if fortran else array)
    described = slot(array, "float32")
    assert bytes(npy.read(described)) == array.astype("<f4").tobytes() == held_bytes(npy, described)


@pytest.mark.parametrize(
    "dtype", ["bfloat16", "float16", "complex32", *(name for name in FLOAT8 if hasattr(torch, name))]
)
@pytest.mark.parametrize("count", [16, SMALL])
def test_widened_values_are_narrowed_back_exactly(dtype: str, count: int, tmp_path: Path) -> None:
    true = getattr(torch, dtype)
    itemsize = DTYPES[dtype].itemsize
    codes = torch.arange(count * itemsize // 2, dtype=torch.int32).to(torch.int16) if itemsize > 1 else None
    raw = codes.view(torch.uint8) if codes is not None else torch.arange(count, dtype=torch.int32).to(torch.uint8)
    tensor = raw.view(true)
    parts = torch.view_as_real(tensor).float() if dtype == "complex32" else tensor.float()
    wide = torch.view_as_complex(parts).numpy() if dtype == "complex32" else parts.numpy()
    npy = save(tmp_path / "d", wide)
    described = slot(wide, dtype)
    read = to_torch(npy.read(described), described)
    again = torch.view_as_real(read).float() if dtype == "complex32" else read.float()
    np.testing.assert_array_equal(again.numpy(), parts.numpy())
    signs = ~torch.isnan(parts)
    assert torch.equal(torch.signbit(again)[signs], torch.signbit(parts)[signs])
    assert held_bytes(npy, described) == bytes(npy.read(described))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e4m3fn"])
def test_value_that_the_true_dtype_cannot_hold_is_named(dtype: str, tmp_path: Path) -> None:
    array = np.array([1, 1, 1.0001], np.float32)
    npy = save(tmp_path / "d", array)
    for look in (npy.read, npy.hold):
        with pytest.raises(TensorDamaged, match=f"at element 2, which {dtype} cannot hold"):
            look(slot(array, dtype))


@pytest.mark.parametrize(
    ("stored", "dtype", "sound"),
    [
        (np.array([1, -2], np.int32), "int64", True),
        (np.array([1, 200], np.int64), "uint8", True),
        (np.array([1, 300], np.int64), "uint8", False),
        (np.array([-1], np.int64), "uint64", False),
        (np.array([2**63], np.uint64), "int64", False),
        (np.array([0.5, np.nan], np.float64), "float32", True),
        (np.array([0.1], np.float64), "float32", False),
        (np.array([1], np.float32), "float64", False),
        (np.array([1], np.int64), "float32", False),
        (np.array([1], np.float32), "int64", False),
        (np.array([1], np.uint8), "bool", False),
    ],
)
def test_other_width_is_read_when_no_value_changes(stored: Any, dtype: str, sound: bool, tmp_path: Path) -> None:
    npy = save(tmp_path / "d", stored)
    if not sound:
        with pytest.raises(TensorDamaged, match=r"cannot hold|is not how"):
            npy.read(slot(stored, dtype))
    else:
        described = slot(stored, dtype)
        np.testing.assert_array_equal(to_numpy(npy.read(described), described), stored)


def test_versions_2_and_3_of_the_format_are_read(tmp_path: Path) -> None:
    array = np.arange(4.0)
    (tmp_path / "d").mkdir()
    for version in ((1, 0), (2, 0), (3, 0)):
        with (tmp_path / "d" / "0.npy").open("wb") as file:
            np.lib.format.write_array(file, array, version=version)
        assert bytes(source(tmp_path / "d").read(slot(array))) == array.tobytes()


def test_header_of_odd_length_gives_aligned_values(tmp_path: Path) -> None:
    array = np.arange(4.0)
    text = b"{'descr': '<f8', 'fortran_order': False, 'shape': (4,), }\n"
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "0.npy").write_bytes(b"\x93NUMPY\1\0" + len(text).to_bytes(2, "little") + text + array.tobytes())
    npy = source(tmp_path / "d")
    address, keep = npy.hold(slot(array))
    assert address % 8 == 0
    assert ctypes.string_at(address, 32) == array.tobytes()
    del keep


def test_held_memory_is_not_written_to_while_it_is_held(tmp_path: Path) -> None:
    count, size = 40, SMALL // 4 - 64
    npy = None
    for number in range(count):
        npy = save(tmp_path / "d", np.full(size, number, np.float32), number)
    assert npy is not None
    described = [slot(np.empty(size, np.float32), number=number) for number in range(count)]
    assert count * size * 4 > 4 * ARENA_BYTES
    kept = [npy.hold(each) for each in described]
    for each in described:  # these are let go at once, and their memory is used again
        npy.hold(each)
    gc.collect()
    for number, (address, _) in enumerate(kept):
        assert ctypes.string_at(address, size * 4) == np.full(size, number, np.float32).tobytes()


def test_memory_that_was_let_go_is_used_again(tmp_path: Path) -> None:
    array = np.zeros(SMALL // 4 - 64, np.float32)
    npy = save(tmp_path / "d", array)
    addresses = {npy.hold(slot(array))[0] for _ in range(100)}
    assert len(addresses) <= 2 * ARENA_BYTES // SMALL


def test_tensors_read_before_do_not_change(tmp_path: Path) -> None:
    for size in (8, SMALL):
        array = np.full(size, 1, np.float32)
        npy = save(tmp_path / "d", array)
        first = npy.read(slot(array))
        second = npy.read(slot(array))
        to_torch(second, slot(array)).fill_(7)
        assert bytes(first) == array.tobytes() == (tmp_path / "d" / "0.npy").read_bytes()[128:]


def test_many_large_files_are_held_without_descriptors(tmp_path: Path) -> None:
    array = np.zeros(SMALL, np.float32)
    npy = save(tmp_path / "d", array)
    npy.hold(slot(array))
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - a Path for each is of no use
    kept = [npy.hold(slot(array)) for _ in range(50)] + [npy.read(slot(array)) for _ in range(50)]
    # Fewer is possible: what earlier tests left open may be collected meanwhile.
    assert len(os.listdir("/proc/self/fd")) <= before  # noqa: PTH208
    assert len(kept) == 100


def test_missing_file_and_other_shape_are_facts(tmp_path: Path) -> None:
    array = np.zeros((2, 3), np.float32)
    npy = save(tmp_path / "d", array)
    with pytest.raises(TensorDamaged, match=r"its file '7\.npy' is missing"):
        npy.read(slot(array, number=7))
    with pytest.raises(TensorDamaged, match=r"holds the shape \[2, 3\], its line says \[3, 2\]"):
        npy.hold(slot(array.T))


def test_folder_that_is_a_link_is_refused(tmp_path: Path) -> None:
    save(tmp_path / "d", np.zeros(2))
    (tmp_path / "e").symlink_to(tmp_path / "d")
    with pytest.raises(RunDamaged, match="symbolic link"):
        source(tmp_path / "e").read(slot(np.zeros(2)))
    assert NpySource(FolderFiles(tmp_path / "e", ()), lambda number: "0.npy").size_bytes() == 128 + 16
