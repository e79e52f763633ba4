"""Law: what torch held, written as the format says, is read back the same, for every dtype, shape and stride."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tensorprobe.errors import NoData
from tensorprobe.model import DTYPES
from tensorprobe.record import open_run, verify_run
from tensorprobe.record.elements import is_dense
from tensorprobe.record.stored import StoredSlot
from tests.builders.dtypes import KNOWN_DTYPES
from tests.builders.runs import Blob, call, slot, write, write_run

# torch warns once when it copies a complex32 tensor, as the tests do; the reader itself must not make it warn.
pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf")
WIDER = {"bfloat16": torch.float32, "complex32": torch.complex64}


def random_tensor(dtype: str, shape: list[int], seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    kind = DTYPES[dtype]
    raw = torch.randint(0, 256, (*shape, kind.itemsize), dtype=torch.uint8, generator=generator)
    return (
        raw.bitwise_and(1).squeeze(-1).view(torch.bool)
        if dtype == "bool"
        else raw.view(getattr(torch, dtype)).squeeze(-1)
    )


def bits(tensor: torch.Tensor) -> bytes:
    """The elements in row-major order, so that NaN is equal to itself."""
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def read_back(root: Path, dtype: str, tensor: torch.Tensor, stored: bytes, stride: list[int] | None) -> StoredSlot:
    blob = Blob()
    blob.add(b"something before it")
    more = {} if stride is None else {"stride": stride}
    line = {
        "name": "Tensor.add.0.forward",
        "slots": [slot("output.0", dtype, list(tensor.shape), stored, blob, **more)],
    }
    write_run(root, [line], blob.content)
    return open_run(root).call("Tensor.add.0").slots[0]


shapes = st.lists(st.integers(0, 4), max_size=4)


@settings(deadline=None, max_examples=80)
@given(dtype=st.sampled_from(sorted(KNOWN_DTYPES)), shape=shapes, seed=st.integers(0, 1000))
def test_contiguous_tensor_is_read_back_bit_for_bit(dtype: str, shape: list[int], seed: int) -> None:
    tensor = random_tensor(dtype, shape, seed)
    with tempfile.TemporaryDirectory() as folder:
        held = read_back(Path(folder), dtype, tensor, bits(tensor), None)
        got = held.tensor()
        assert (got.dtype, got.shape, got.is_contiguous()) == (tensor.dtype, tensor.shape, True)
        assert bits(got) == bits(tensor)
        assert bytes(held.buffer()) == bits(tensor)


@settings(deadline=None, max_examples=60)
@given(data=st.data(), dtype=st.sampled_from(sorted(KNOWN_DTYPES)), shape=shapes, seed=st.integers(0, 1000))
def test_permuted_block_is_read_through_its_stride(
    data: st.DataObject, dtype: str, shape: list[int], seed: int
) -> None:
    block = random_tensor(dtype, shape, seed)
    order = data.draw(st.permutations(range(len(shape))))
    tensor = block.permute(order)
    with tempfile.TemporaryDirectory() as folder:
        held = read_back(Path(folder), dtype, tensor, bits(block), list(tensor.stride()))
        got = held.tensor()
        assert got.shape == tensor.shape
        assert bits(got) == bits(tensor)
        if tensor.numel():
            assert got.stride() == tensor.stride()
        assert_same_values(held.numpy(), tensor)


@settings(deadline=None, max_examples=40)
@given(dtype=st.sampled_from(sorted(KNOWN_DTYPES)), seed=st.integers(0, 1000), step=st.integers(2, 3))
def test_tensor_with_holes_is_stored_in_row_major_order(dtype: str, seed: int, step: int) -> None:
    tensor = random_tensor(dtype, [4, 6], seed)[:, ::step]
    with tempfile.TemporaryDirectory() as folder:
        held = read_back(Path(folder), dtype, tensor, bits(tensor), list(tensor.stride()))
        assert bits(held.tensor()) == bits(tensor)
        assert_same_values(held.numpy(), tensor)


def assert_same_values(array: numpy.ndarray, tensor: torch.Tensor) -> None:
    name = str(tensor.dtype).removeprefix("torch.")
    wider = torch.float32 if name.startswith("float8") else WIDER.get(name)
    expected = (tensor if wider is None else tensor.to(wider)).numpy()
    assert array.dtype == expected.dtype
    with numpy.errstate(invalid="ignore"):  # numpy 2.2 warns of NaN in complex numbers
        numpy.testing.assert_array_equal(array, expected)


@pytest.mark.parametrize("dtype", sorted(KNOWN_DTYPES))
def test_numpy_gives_the_values_that_torch_has(dtype: str, tmp_path: Path) -> None:
    tensor = random_tensor(dtype, [3, 5], 7)
    assert_same_values(read_back(tmp_path, dtype, tensor, bits(tensor), None).numpy(), tensor)


@pytest.mark.parametrize(
    ("shape", "stride", "dense"),
    [
        ([2, 3], [3, 1], True),
        ([2, 3], [1, 2], True),
        ([2, 1, 3], [3, 999, 1], True),
        ([2, 3], [6, 2], False),
        ([2, 3], [0, 1], False),
        ([], [], True),
    ],
)
def test_dense_strides_are_told_from_others(shape: list[int], stride: list[int], dense: bool) -> None:
    assert is_dense(shape, stride) is dense


def test_writing_into_a_tensor_does_not_reach_the_file(tmp_path: Path) -> None:
    tensor = torch.arange(4, dtype=torch.float32)
    held = read_back(tmp_path, "float32", tensor, bits(tensor), None)
    before = (tmp_path / "step0/rank0/tensors.bin").read_bytes()
    held.tensor().fill_(9)
    assert (tmp_path / "step0/rank0/tensors.bin").read_bytes() == before
    assert open_run(tmp_path).call("Tensor.add.0").slots[0].tensor().tolist() == [0, 1, 2, 3]


def test_tensor_lies_on_the_mapped_memory(tmp_path: Path) -> None:
    tensor = torch.arange(4, dtype=torch.float32)
    held = read_back(tmp_path, "float32", tensor, bits(tensor), None)
    assert held.tensor().data_ptr() == held.tensor().data_ptr() == held.numpy().ctypes.data


def test_tensor_outlives_the_run(tmp_path: Path) -> None:
    tensor = torch.arange(4, dtype=torch.float32)
    got = read_back(tmp_path, "float32", tensor, bits(tensor), None).tensor()
    assert got.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("more", "told"),
    [({}, "only its description was recorded"), ({"skipped": "sparse layout"}, "skipped: sparse layout")],
)
def test_slot_without_values_says_why(more: dict[str, str], told: str, tmp_path: Path) -> None:
    line = {"name": "Tensor.add.0.forward", "slots": [{"name": "output.0", "dtype": "float32", "shape": [2], **more}]}
    write_run(tmp_path, [line])
    held = open_run(tmp_path).call("Tensor.add.0").slots[0]
    with pytest.raises(NoData, match=rf"(?s)output\.0 of Tensor\.add\.0\.forward .*{told}.*mode='tensor'"):
        held.tensor()
    with pytest.raises(NoData):
        held.numpy()
    with pytest.raises(NoData):
        held.buffer()


@pytest.mark.parametrize("shape", [[2], [0, 3]])
@pytest.mark.filterwarnings("error")
def test_reading_complex32_does_not_warn(shape: list[int], tmp_path: Path) -> None:
    raw = bytes(4 * shape[0])
    line = {"name": "Tensor.add.0.forward", "slots": [slot("output.0", "complex32", shape, raw, blob := Blob())]}
    write_run(tmp_path, [line], blob.content)
    assert list(open_run(tmp_path).call("Tensor.add.0").slots[0].tensor().shape) == shape


def test_verifying_a_run_leaves_what_was_written_to_its_tensors(tmp_path: Path) -> None:
    x = numpy.zeros(20 << 20, numpy.float32)
    run = open_run(write(tmp_path / "run", [call("Torch.exp.0.forward", inputs=[x], outputs=[x])]))
    (stored,) = run.calls()
    held = stored.slots[0].tensor()
    held[-1] = 7
    assert verify_run(run, data=True).problems == []
    assert held[-1] == 7
