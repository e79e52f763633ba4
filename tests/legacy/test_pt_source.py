"""Tensors in files of torch.save are read as torch reads them, without torch and without running anything in them."""

from __future__ import annotations

import collections
import contextlib
import ctypes
import io
import os
import pickle
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tensorprobe.errors import TensorDamaged
from tensorprobe.legacy.layouts import pt
from tensorprobe.legacy.layouts.pt_format import SavedTensor, describe_tensor
from tensorprobe.legacy.layouts.value_files import FolderFiles
from tensorprobe.model import DTYPES, Slot

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
    *([torch.arange(3).to(torch.uint16)] if hasattr(torch, "uint16") else []),
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


@pytest.fixture(autouse=True)
def without_torch_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.load is not used on a foreign file."""
    monkeypatch.setattr(torch, "load", None)


@pytest.fixture
def source(tmp_path: Path) -> Iterator[pt.PtSource]:
    files = FolderFiles(tmp_path, ())
    yield pt.PtSource(files, lambda number: f"{number}.pt")
    files.close()


def held_bytes(source: pt.PtSource, slot: Slot) -> bytes:
    address, keeper = source.hold(slot)
    assert keeper is not None
    return ctypes.string_at(address, slot.nbytes)


def _case(tensor: torch.Tensor) -> Any:
    since = {torch.float8_e4m3fn: "2.4", getattr(torch, "uint16", None): "2.6"}.get(tensor.dtype, "2.1")
    needs = pytest.mark.needs_torch(since, f"torch.save of {tensor.dtype}")
    return pytest.param(tensor, id=f"{tensor.dtype}-{list(tensor.shape)}", marks=needs)


@pytest.mark.parametrize("tensor", [_case(tensor) for tensor in [*PLAIN, *OTHER]])
@pytest.mark.parametrize("form", ["archive", "before archives", "protocol 4"])
def test_tensor_is_read(tmp_path: Path, source: pt.PtSource, tensor: torch.Tensor, form: str) -> None:
    settings = {"_use_new_zipfile_serialization": False} if form == "before archives" else {}
    torch.save(tensor, tmp_path / "7.pt", pickle_protocol=4 if form == "protocol 4" else 2, **settings)
    slot = slot_of(tensor)
    assert bytes(source.read(slot)) == held_bytes(source, slot) == bytes_of(tensor)


def test_tensor_with_attributes_is_read(tmp_path: Path, source: pt.PtSource) -> None:
    for tensor in (torch.arange(6.0), torch.nn.Parameter(torch.arange(6.0))):
        tensor.partition_dim = 1  # type: ignore[attr-defined]
        tensor.named = {"stride": [1, 2.5], "of": None}  # type: ignore[attr-defined]
        torch.save(tensor, tmp_path / "7.pt")
        assert bytes(source.read(slot_of(tensor))) == bytes_of(tensor)


def test_view_of_a_shared_storage_is_read(tmp_path: Path, source: pt.PtSource) -> None:
    whole = torch.arange(400_000.0).reshape(4, 1000, 100)
    for view in (whole[1], whole[:, ::3, 5], whole[2, 10:20].t(), whole[3, 999:, :1]):
        torch.save(view, tmp_path / "7.pt")
        assert bytes(source.read(slot_of(view))) == held_bytes(source, slot_of(view)) == bytes_of(view)


def test_archive_with_64_bit_sizes_is_read(tmp_path: Path, source: pt.PtSource) -> None:
    tensor = torch.arange(6.0)
    with zipfile.ZipFile(tmp_path / "7.pt", "w") as file:
        for name, content in (("data.pkl", text_of(tensor)), ("data/0", bytes_of(tensor))):
            with file.open(f"archive/{name}", "w", force_zip64=True) as part:
                part.write(content)
    assert bytes(source.read(slot_of(tensor))) == bytes_of(tensor)


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
    tmp_path: Path, source: pt.PtSource, storage_format: bytes
) -> None:
    tensor = torch.arange(6.0).reshape(2, 3)
    text = text_of(tensor).replace(b"torch._utils\n_rebuild_tensor_v2", b"torch_npu.utils.storage\n_rebuild_npu_tensor")
    head, tail = text[: -len(b"tq\x0aRq\x0b.")], text[-len(b"tq\x0aRq\x0b.") :]
    (tmp_path / "7.pt").write_bytes(archive(head + storage_format + tail, bytes_of(tensor)))
    assert bytes(source.read(slot_of(tensor))) == held_bytes(source, slot_of(tensor)) == bytes_of(tensor)


@pytest.mark.parametrize("tensor", [torch.arange(6.0), torch.arange(6.0).bfloat16(), torch.tensor([1 + 2j, 3j])])
def test_storage_of_another_byte_order_is_put_right(tmp_path: Path, source: pt.PtSource, tensor: torch.Tensor) -> None:
    parts = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    swapped = parts.contiguous().view(torch.uint8).reshape(-1, parts.element_size()).flip(1).numpy().tobytes()
    (tmp_path / "7.pt").write_bytes(archive(text_of(tensor), swapped, order=b"big"))
    assert bytes(source.read(slot_of(tensor))) == bytes_of(tensor)


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
        (Slot("output.0", "float99", (2, 3), offset=7, nbytes=24), "dtype 'float99' is not a known dtype"),
        (Slot("output.0", "float32", (2, 3), nbytes=24), "it has no file"),
        (Slot("output.0", "float32", (2, 3), offset=8, nbytes=24), "8.pt' is missing"),
    ],
)
def test_file_that_does_not_fit_the_slot_is_told(tmp_path: Path, source: pt.PtSource, slot: Slot, fact: str) -> None:
    torch.save(torch.arange(6.0).reshape(2, 3), tmp_path / "7.pt")
    for read in (source.read, source.hold):
        with pytest.raises(TensorDamaged, match=fact):
            read(slot)


@pytest.mark.parametrize("tensor", [PLAIN[2], OTHER[1]], ids=["row by row", "transposed"])
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
        with pytest.raises(
            TensorDamaged, match=r"asks for 'posix\.system', .* it was not run\. If you trust it, save it again"
        ):
            source.read(slot_of(torch.arange(4.0)))
    assert not (tmp_path / "touched").exists()


@pytest.mark.parametrize(
    ("make", "fact"),
    [
        (lambda: collections.OrderedDict(a=torch.arange(40.0)), "a plain tensor: a dict"),
        (lambda: [torch.arange(40.0)] * 2, "a plain tensor: a list"),
        (lambda: 5, "a plain tensor: a int"),
        (lambda: torch.arange(40.0).to_sparse(), "a plain tensor: a sparse tensor"),
        (lambda: torch.eye(9).to_sparse_csr(), "a plain tensor: a sparse tensor"),
        (lambda: torch.quantize_per_tensor(torch.arange(40.0), 0.1, 0, torch.qint8), "a quantized tensor"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_something_else_than_a_tensor_is_told(
    tmp_path: Path, source: pt.PtSource, make: Callable[[], Any], fact: str
) -> None:
    torch.save(make(), tmp_path / "7.pt")
    with pytest.raises(
        TensorDamaged, match=rf"something else than .*{fact}\. If you trust it, save it again as one plain tensor"
    ):
        source.read(slot_of(torch.arange(4.0)))


def test_directory_that_would_fill_the_memory_is_not_read(tmp_path: Path, source: pt.PtSource) -> None:
    with zipfile.ZipFile(tmp_path / "7.pt", "w") as file:
        for number in range(4000):
            file.writestr(f"archive/{number:040}", b"")
    with pytest.raises(TensorDamaged, match=r"not a sound archive: .* bytes of directory"):
        source.read(slot_of(torch.arange(4.0)))


@pytest.mark.parametrize(
    "end",
    [b"", b"}X\1\0\0\0ah\xc8s", b"h\xc8)R", b"}h\xc8)s", b"h\xc8Q"],
    ids=["alone", "value", "called", "key", "storage"],
)
def test_pickle_that_doubles_again_and_again_costs_nothing(tmp_path: Path, source: pt.PtSource, end: bytes) -> None:
    pairs = b"".join(b"h%ch%c\x86q%c" % (at, at, at + 1) for at in range(200))
    text = b"\x80\x02)q\0" + pairs + end + b"."
    (tmp_path / "7.pt").write_bytes(archive(text, bytes(400)))
    with pytest.raises(TensorDamaged):
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


def test_description_is_read_only_as_a_whole() -> None:
    text = text_of(torch.arange(6.0).reshape(2, 3))
    assert describe_tensor(text) == SavedTensor("float32", (2, 3), (3, 1), 0, "0", 24)
    for wrong in (
        text + b".",
        text[:-1],
        text.replace(b"_rebuild_tensor_v2", b"_rebuild_tensor_v9"),
        text.replace(b"torch._utils", b"os.path.abc1"),
        text.replace(b"FloatStorage", b"OtherStorage"),
        text.replace(b"\x86q\x06", b"\x85q\x06"),
        text.replace(b"X\x07\0\0\0storage", b"X\x07\0\0\0storagX"),
    ):
        with pytest.raises(TensorDamaged):
            describe_tensor(wrong)
    changed = [text[:at] + bytes([text[at] ^ bit]) + text[at + 1 :] for at in range(len(text)) for bit in (1, 16, 128)]
    for each in changed:  # whatever it says now, it is a tensor or TensorDamaged
        with contextlib.suppress(TensorDamaged):
            assert describe_tensor(each).dtype in DTYPES


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
