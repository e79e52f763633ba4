"""Tensors in files of torch.save are read as torch reads them, without running anything that stands in them."""

from __future__ import annotations

import collections
import ctypes
import io
import os
import pickle
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tensorprobe.errors import TensorDamaged
from tensorprobe.legacy.layouts import pt
from tensorprobe.legacy.layouts.folder_files import FolderFiles
from tensorprobe.legacy.layouts.pt_pickle import read_plain_tensor
from tensorprobe.model import Slot

PLAIN = [
    torch.tensor(1.5),
    torch.arange(5.0),
    torch.arange(6.0).reshape(2, 3),
    torch.arange(24, dtype=torch.float64).reshape(2, 3, 4),
    torch.arange(120, dtype=torch.int64).reshape(2, 3, 4, 5),
    torch.arange(7, dtype=torch.int8).reshape(1, 1, 1, 1, 7),
    torch.arange(3.0).to(torch.bfloat16),
    torch.arange(3.0).half(),
    torch.tensor([True, False]),
    torch.tensor([1 + 2j, 3j]),
    torch.arange(3).to(torch.uint16),
    torch.arange(4.0).to(torch.float8_e4m3fn),
    torch.ones(4, requires_grad=True),
    torch.arange(1000.0).reshape(1000, 1).t(),
    torch.arange(70_000.0),
    torch.arange(300_000.0),
]
OTHER = [
    torch.nn.Parameter(torch.arange(2.0)),
    torch.arange(12.0).reshape(3, 4).t(),
    torch.arange(9.0)[3:],
    torch.arange(600_000.0).reshape(1000, 600).t(),
    torch.tensor([1 + 2j, 3j]).conj(),
    torch.tensor([1.0, -2.0])._neg_view(),
]


def slot_of(tensor: torch.Tensor) -> Slot:
    dtype = str(tensor.dtype).removeprefix("torch.")
    nbytes = tensor.numel() * tensor.element_size()
    return Slot(name="output.0", dtype=dtype, shape=tuple(tensor.shape), offset=7, nbytes=nbytes)


def bytes_of(tensor: torch.Tensor) -> bytes:
    dense = tensor.detach().resolve_conj().resolve_neg().contiguous().flatten()
    return dense.view(torch.uint8).numpy().tobytes()


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The slots for which torch was asked."""
    asked: list[str] = []
    real = pt._loaded_values
    monkeypatch.setattr(pt, "_loaded_values", lambda content, slot: asked.append(slot.name) or real(content, slot))
    return asked


@pytest.fixture
def source(tmp_path: Path) -> Iterator[pt.PtSource]:
    files = FolderFiles(tmp_path, ())
    yield pt.PtSource(files, lambda number: f"{number}.pt")
    files.close()


def held_bytes(source: pt.PtSource, slot: Slot) -> bytes:
    address, keeper = source.hold(slot)
    assert keeper is not None
    return ctypes.string_at(address, slot.nbytes)


@pytest.mark.parametrize("tensor", PLAIN, ids=lambda tensor: f"{tensor.dtype}-{list(tensor.shape)}")
def test_plain_tensor_is_read_without_torch(
    tmp_path: Path, source: pt.PtSource, loaded: list[str], tensor: torch.Tensor
) -> None:
    torch.save(tensor, tmp_path / "7.pt")
    slot = slot_of(tensor)
    assert bytes(source.read(slot)) == held_bytes(source, slot) == bytes_of(tensor)
    assert loaded == []


@pytest.mark.parametrize("tensor", OTHER, ids=range(len(OTHER)))
def test_tensor_in_another_form_is_read_through_torch(
    tmp_path: Path, source: pt.PtSource, loaded: list[str], tensor: torch.Tensor
) -> None:
    torch.save(tensor, tmp_path / "7.pt")
    slot = slot_of(tensor)
    assert bytes(source.read(slot)) == held_bytes(source, slot) == bytes_of(tensor)
    assert len(loaded) == 2


def test_file_of_an_old_torch_is_read_through_torch(tmp_path: Path, source: pt.PtSource, loaded: list[str]) -> None:
    tensor = torch.arange(6.0)
    torch.save(tensor, tmp_path / "7.pt", _use_new_zipfile_serialization=False)
    assert bytes(source.read(slot_of(tensor))) == bytes_of(tensor)
    assert loaded == ["output.0"]


def archive(text: bytes, values: bytes, *, order: bytes | None = b"little", packed: bool = False) -> bytes:
    """An archive as torch.save makes it, but for the places of its files."""
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED if packed else zipfile.ZIP_STORED) as file:
        file.writestr("archive/data.pkl", text)
        file.writestr("archive/version", b"3\n")
        if order is not None:
            file.writestr("archive/byteorder", order)
        file.writestr("archive/data/0", values)
    return made.getvalue()


def text_of(tensor: torch.Tensor) -> bytes:
    made = io.BytesIO()
    torch.save(tensor, made)
    with zipfile.ZipFile(made) as file:
        return file.read("archive/data.pkl")


@pytest.mark.parametrize(
    "storage_format",
    [b"K\x02", b"\x89", b"ctorch_npu.npu._format\nFormat\nq\x0aK\x02\x85q\x0bRq\x0c"],
    ids=["number", "bool", "enum"],
)
def test_tensor_of_an_npu_is_read_where_there_is_none(
    tmp_path: Path, source: pt.PtSource, loaded: list[str], storage_format: bytes
) -> None:
    tensor = torch.arange(6.0).reshape(2, 3)
    text = text_of(tensor).replace(b"torch._utils\n_rebuild_tensor_v2", b"torch_npu.utils.storage\n_rebuild_npu_tensor")
    head, tail = text[: -len(b"tq\x0aRq\x0b.")], text[-len(b"tq\x0aRq\x0b.") :]
    (tmp_path / "7.pt").write_bytes(archive(head + storage_format + tail, bytes_of(tensor)))
    assert bytes(source.read(slot_of(tensor))) == held_bytes(source, slot_of(tensor)) == bytes_of(tensor)
    assert loaded == []


def test_storage_of_another_byte_order_is_left_to_torch(tmp_path: Path, source: pt.PtSource, loaded: list[str]) -> None:
    tensor = torch.arange(6.0)
    swapped = tensor.numpy().astype(">f4").tobytes()
    (tmp_path / "7.pt").write_bytes(archive(text_of(tensor), swapped, order=b"big"))
    assert bytes(source.read(slot_of(tensor))) == bytes_of(tensor)
    assert loaded == ["output.0"]


@pytest.mark.parametrize(
    ("slot", "fact"),
    [
        (
            Slot("output.0", "float32", (3, 2), offset=7, nbytes=24),
            r"holds float32 \[2, 3\], dump.json says float32 \[3, 2\]",
        ),
        (Slot("output.0", "int32", (2, 3), offset=7, nbytes=24), "holds float32"),
        (Slot("output.0", "float32", (2, 3), offset=7, nbytes=20), "declares 20 bytes"),
        (Slot("output.0", "float32", (2000,), offset=7, nbytes=8000), "it has 8,000 bytes, its file has"),
        (Slot("output.0", "float99", (2, 3), offset=7, nbytes=24), "dtype 'float99' is not one"),
        (Slot("output.0", "float32", (2, 3), nbytes=24), "it has no file"),
        (Slot("output.0", "float32", (2, 3), offset=8, nbytes=24), "8.pt' is missing"),
    ],
)
def test_file_that_does_not_fit_the_slot_is_told(tmp_path: Path, source: pt.PtSource, slot: Slot, fact: str) -> None:
    torch.save(torch.arange(6.0).reshape(2, 3), tmp_path / "7.pt")
    for read in (source.read, source.hold):
        with pytest.raises(TensorDamaged, match=fact):
            read(slot)


@pytest.mark.parametrize("tensor", [PLAIN[2], OTHER[1]], ids=["plain", "through torch"])
def test_cut_file_is_told(tmp_path: Path, source: pt.PtSource, tensor: torch.Tensor) -> None:
    torch.save(tensor, tmp_path / "7.pt")
    content = (tmp_path / "7.pt").read_bytes()
    for length in range(0, len(content), 97):
        (tmp_path / "7.pt").write_bytes(content[:length])
        with pytest.raises(TensorDamaged):
            source.read(slot_of(tensor))


class Runs:
    """What runs a command when it is unpickled."""

    def __reduce__(self) -> Any:
        return os.system, ("touch touched",)


def test_pickle_that_runs_something_is_not_run(
    tmp_path: Path, source: pt.PtSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    evil = pickle.dumps(Runs(), protocol=2)
    for content in (archive(evil, bytes(400)), evil + bytes(400)):
        (tmp_path / "7.pt").write_bytes(content)
        with pytest.raises(TensorDamaged, match=r"torch\.load refuses its file"):
            source.read(slot_of(torch.arange(4.0)))
    assert not (tmp_path / "touched").exists()


def test_something_else_than_a_tensor_is_told(tmp_path: Path, source: pt.PtSource) -> None:
    for held in (collections.OrderedDict(a=torch.arange(40.0)), torch.arange(40.0).to_sparse()):
        torch.save(held, tmp_path / "7.pt")
        with pytest.raises(TensorDamaged, match="something else than a plain tensor"):
            source.read(slot_of(torch.arange(4.0)))


def test_compressed_archive_is_refused(tmp_path: Path, source: pt.PtSource) -> None:
    tensor = torch.zeros(100)
    padded = archive(text_of(tensor), os.urandom(500) + bytes(500), packed=True)
    (tmp_path / "7.pt").write_bytes(padded)
    with pytest.raises(TensorDamaged, match="compressed archive"):
        source.read(slot_of(tensor))


def test_shape_beyond_the_storage_is_told(tmp_path: Path, source: pt.PtSource) -> None:
    text = text_of(torch.arange(100.0)).replace(b"QK\0K\x64\x85", b"QK\0M\xe8\x03\x85")
    (tmp_path / "7.pt").write_bytes(archive(text, bytes(400)))
    slot = Slot("output.0", "float32", (1000,), offset=7, nbytes=4000)
    with pytest.raises(TensorDamaged, match="it has 4,000 bytes, its file has"):
        source.read(slot)
    (tmp_path / "7.pt").write_bytes(archive(text, bytes(400), order=bytes(4000)))
    with pytest.raises(TensorDamaged):
        source.read(slot)


def test_text_is_recognised_only_as_a_whole() -> None:
    text = text_of(torch.arange(6.0).reshape(2, 3))
    tensor = read_plain_tensor(text)
    assert tensor is not None
    assert (tensor.dtype, tensor.shape, tensor.stride, tensor.key, tensor.nbytes) == (
        "float32",
        (2, 3),
        (3, 1),
        b"0",
        24,
    )
    assert read_plain_tensor(text + b".") is None
    assert read_plain_tensor(text[:-1]) is None
    assert read_plain_tensor(text.replace(b"_rebuild_tensor_v2", b"_rebuild_tensor_v9")) is None
    assert read_plain_tensor(text.replace(b"torch._utils", b"os.path.abc1")) is None
    assert read_plain_tensor(text.replace(b"FloatStorage", b"OtherStorage")) is None
    assert read_plain_tensor(text.replace(b"\x86q\x06", b"\x85q\x06")) is None
    changed = [text[:at] + bytes([text[at] ^ 0x10]) + text[at + 1 :] for at in range(len(text))]
    recognised = {held for each in changed if (held := read_plain_tensor(each)) is not None}
    assert {(held.dtype, len(held.shape)) for held in recognised} <= {("float32", 2), ("float16", 2)}


def test_memory_that_is_held_is_not_written_to_again(tmp_path: Path) -> None:
    count = 600
    for number in range(count):
        torch.save(torch.full((2000,), float(number)), tmp_path / f"{number}.pt")
    files = FolderFiles(tmp_path, ())
    source = pt.PtSource(files, lambda number: f"{number}.pt")
    slots = [Slot("output.0", "float32", (2000,), offset=number, nbytes=8000) for number in range(count)]
    held = [source.hold(slot) for slot in slots]
    seen = [ctypes.cast(address, ctypes.POINTER(ctypes.c_float))[1999] for address, _ in held]
    files.close()
    assert seen == [float(number) for number in range(count)]
