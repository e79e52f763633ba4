"""The C loops of capture do what the Python beside them does: the same slots, the same bytes, the same trees."""

from __future__ import annotations

import ctypes
import dataclasses
import enum
import math
from collections import namedtuple
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tensorprobe import _fast as native
from tensorprobe import arguments as flatten
from tensorprobe import torch_names
from tensorprobe.model.event import NO_TOKEN
from tensorprobe.record import snapshot
from tensorprobe.record.run import Run
from tensorprobe.record.snapshot import _DTYPES, Snapshots
from tensorprobe.record.writer import HEAD, TOKENS, RunWriter
from tests.taps.tiny import TiedGPT, record, tokens

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*omplex.*:UserWarning", "ignore:.*prototype stage.*", "ignore:.*quantiz.*", "ignore:.*CSR.*"
)


class Subclass(Tensor):
    """A subclass that adds nothing."""


def filled(dtype: torch.dtype, shape: list[int], seed: int = 0) -> Tensor:
    """A tensor of random bits."""
    count = math.prod(shape) * dtype.itemsize
    raw = torch.randint(0, 256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return (raw % 2 if dtype is torch.bool else raw).view(dtype).reshape(shape)


def takes_gradients(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


WAYS: dict[str, Callable[[Tensor], Tensor]] = {
    "as it is": lambda t: t,
    "transposed": lambda t: t.transpose(0, -1) if t.ndim > 1 else t,
    "every second": lambda t: t[::2] if t.ndim else t,
    "from the second on": lambda t: t[1:] if t.ndim else t,
    "a column": lambda t: t.select(-1, t.shape[-1] - 1) if t.ndim and t.shape[-1] else t,
    "expanded": lambda t: t.expand(3, *t.shape),
    "conjugate": lambda t: t.conj(),
    "negative": lambda t: torch._neg_view(t) if takes_gradients(t) else t,
    "imaginary part of a conjugate": lambda t: t.conj().imag if t.is_complex() else t,
    "parameter": lambda t: nn.Parameter(t, requires_grad=takes_gradients(t)),
    "with gradient": lambda t: t.requires_grad_() if takes_gradients(t) else t,
    "subclass": lambda t: t.as_subclass(Subclass),
    "meta": lambda t: t.to("meta"),
    "sparse": lambda t: t.to_sparse() if t.dtype is torch.float32 and t.ndim else t,
    "sparse rows": lambda t: t.to_sparse_csr() if t.dtype is torch.float32 and t.ndim == 2 else t,
    "nested": lambda t: torch.nested.nested_tensor([t, t]) if t.dtype is torch.float32 and t.ndim else t,
    "quantized": lambda t: torch.quantize_per_tensor(t, 0.5, 0, torch.qint8) if t.dtype is torch.float32 else t,
    "zeros without memory": lambda t: torch._efficientzerotensor(t.shape, dtype=torch.float64),
}


@st.composite
def any_tensor(draw: st.DrawFn) -> Tensor:
    dtype = draw(st.sampled_from(list(_DTYPES)))
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    way = draw(st.sampled_from(list(WAYS.values())))
    return way(filled(dtype, shape, draw(st.integers(0, 9))))


class Bench:
    """A real writer, with snapshots that are taken in C or in Python; what is in the ring is looked at when it is sent."""

    def __init__(self, run: Path, ring_bytes: int) -> None:
        run.mkdir()
        self.writer = RunWriter(run, 0, keep_data=True, ring_bytes=ring_bytes, direct=False)
        self.snapshots = Snapshots(self.writer, mode="tensor", floating_only=False)
        self.pieces: list[Any] = []
        self._encode = self.writer._encode
        self.writer._encode = self._look

    def _look(self, frame: tuple[Any, Any]) -> bytes:
        address, size, _ = self.writer.ring
        for piece in frame[0]:
            position, nbytes, _, _ = piece
            self.pieces.append((piece, ctypes.string_at(address + position % size, nbytes)))
        return self._encode(frame)

    def take(self, tensors: list[tuple[str, Tensor]]) -> list[tuple[bytes, Any]]:
        """Each slot as it is sent, but for its token, with the dtype code and the bytes that the token stands for."""
        first = self.writer.state[TOKENS]
        with torch_names.no_overrides():
            slots = self.snapshots.take(tensors)
        given = range(first, self.writer.state[TOKENS])
        self.writer.drop(list(given))
        assert sorted(slot.token for slot in slots if slot.token != NO_TOKEN) == list(given)
        taken = []
        for slot in slots:
            token, slot.token = slot.token, NO_TOKEN
            (_, _, code, last), content = self.pieces[token] if token != NO_TOKEN else ((0, 0, None, True), None)
            assert last
            taken.append((msgspec.msgpack.encode(slot), (code, content)))
        return taken


@contextmanager
def both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, ring_bytes: int
) -> Iterator[tuple[Bench, Bench, list[Any]]]:
    """A bench with C, one with Python, and what C gave back."""
    answers: list[Any] = []

    def take(context: Any, tensors: Any) -> Any:
        slots = native.take(context, tensors)
        answers.extend(slots)
        return slots

    benches = []
    for name, fast in (("python", None), ("c", SimpleNamespace(context=native.context, take=take))):
        monkeypatch.setattr(snapshot, "fast", fast)
        benches.append(Bench(tmp_path / name, ring_bytes))
    try:
        yield benches[1], benches[0], answers
    finally:
        for bench in benches:
            bench.writer.close({}, {}, "cpu")
            assert bench.writer.failure is None


def test_slots_and_bytes_are_those_of_the_python_twin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with both(tmp_path, monkeypatch, ring_bytes=1 << 20) as (c, python, answers):

        def agree(chosen: list[Tensor]) -> None:
            named = [(f"input.{i}", tensor) for i, tensor in enumerate(chosen)]
            assert c.take(named) == python.take(named)

        for dtype in _DTYPES:
            for shape in ([], [0], [5], [3, 4]):
                agree([way(filled(dtype, shape)) for way in WAYS.values()])
        settings(max_examples=300, deadline=None)(given(st.lists(any_tensor(), max_size=6))(agree))()
        assert c.snapshots.skipped == python.snapshots.skipped
        assert c.snapshots.bytes_seen == python.snapshots.bytes_seen
        assert c.snapshots.slots == python.snapshots.slots > 0
        assert None in answers and any(slot is not None for slot in answers)


def test_plain_tensors_stand_at_the_same_places_round_after_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A ring of 4 KiB: most examples go past its end, and now and then it is full and the recorder is waited for."""
    with both(tmp_path, monkeypatch, ring_bytes=4096) as (c, python, answers):

        @settings(max_examples=100, deadline=None)
        @given(st.lists(st.integers(0, 1024), min_size=1, max_size=8))
        def agree(sizes: list[int]) -> None:
            for size in sizes:  # one by one: of several, those that C has room for would go before the others
                tensor = filled(torch.uint8, [size], size)
                assert c.take([("input.0", tensor)]) == python.take([("input.0", tensor)])

        agree()
        assert c.pieces == python.pieces
        assert c.writer.state[HEAD] > 10 * 4096
        assert None in answers and any(slot is not None for slot in answers)


def described(run: Run) -> list[Any]:
    fields = ("name", "dtype", "shape", "stride", "device", "grad", "summary", "digest", "nbytes", "skipped")
    return [
        (call.name, call.args, call.kwargs, [[getattr(slot, field) for field in fields] for slot in call.slots])
        for call in run.calls()
    ]


def test_a_training_is_recorded_alike_with_and_without_the_c_loops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensors larger than the ring takes in one piece too, and ones that fill it."""

    torch.manual_seed(5)
    model = TiedGPT()

    def train() -> None:
        model.zero_grad()
        model(tokens()).backward()
        for kilobytes in (64, 200, 255, 256, 257, 300, 2000):
            large = filled(torch.int8, [kilobytes * 1024 + 3], kilobytes)
            torch.clone(large[1:])

    runs = []
    for name, fast in (("c", native), ("python", None)):
        for module in (flatten, snapshot):
            monkeypatch.setattr(module, "fast", fast)
        run = record(tmp_path / name, train, mode="tensor", ring_bytes=1 << 20)
        runs.append(described(run))
    assert runs[0] == runs[1]
    assert len(runs[0]) > 50


class Hue(enum.IntEnum):
    RED = 3


class Word(str):
    """A string of a type of its own."""


@dataclasses.dataclass
class Pair:
    left: Any
    right: Any


Point = namedtuple("Point", "x y")
SAMPLES = [torch.zeros(2), nn.Parameter(torch.ones(1)), torch.zeros(1).as_subclass(Subclass)]

leaves = (
    st.sampled_from(SAMPLES)
    | st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([2**63 - 1, 2**63, -(2**63), -(2**63) - 1])
    | st.floats()
    | st.complex_numbers()
    | st.text(max_size=3)
    | st.sampled_from(
        [Hue.RED, Word("w"), torch.float32, torch.strided, torch.preserve_format, torch.device("cpu"), ...]
    )
    | st.sampled_from([torch.Size([1, 2]), slice(1, None, 2), torch.add, object, Tensor, b"bytes", {1, 2}])
)


def nested(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=2) | st.integers(), inner, max_size=3)
        | st.builds(Pair, inner, inner)
        | st.builds(Point, inner, inner)
    )


values = st.recursive(leaves, nested, max_leaves=8)


@settings(max_examples=400, deadline=None)
@given(
    st.lists(values, max_size=70).map(tuple) | st.lists(leaves, min_size=60, max_size=70).map(tuple),
    st.dictionaries(st.text(max_size=3), values, max_size=2),
)
def test_arguments_give_the_same_trees_and_names(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    found = []
    for fast in (native, None):
        tensors: flatten.Tensors = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(flatten, "fast", fast)
            trees = flatten.flatten_arguments(args, kwargs, tensors)
        found.append((trees, repr(trees), [(name, id(tensor)) for name, tensor in tensors]))
    assert found[0] == found[1]
