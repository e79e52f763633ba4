"""The C loops of capture on a ring set by hand: where bytes go, what is left to Python, what is refused, and that nothing leaks."""

from __future__ import annotations

import ctypes
import gc
import sys
import tracemalloc
from array import array
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tensorprobe import _fast as native
from tensorprobe import arguments as flatten
from tensorprobe import torch_names
from tensorprobe.model.event import SlotEvent
from tensorprobe.record.snapshot import _DTYPES
from tensorprobe.record.writer import FREE_TO, HEAD, POPULATED, TOKENS

FOR_EVER = 2**63 - 1


def random_bytes(count: int) -> Tensor:
    return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(count))


class HandRing:
    """A ring whose state the test sets; the owner of its pieces, too."""

    def __init__(
        self, size: int = 4096, *, largest: int | None = None, tensor_type: type = Tensor, dtypes: Any = None
    ) -> None:
        self.pieces: list[Any] = []
        self.size = size
        self.state = array("q", [0, size, size, 0, 0])
        self._memory = ctypes.create_string_buffer(size + 64)
        self.address = (ctypes.addressof(self._memory) + 63) // 64 * 64
        largest = size // 4 if largest is None else largest
        state, dtypes = self.state.buffer_info()[0], dtypes or _DTYPES
        self.context = native.context(
            tensor_type, nn.Parameter, dtypes, SlotEvent, self, self.address, size, state, largest
        )

    def take(self, *tensors: Any) -> list[Any]:
        return native.take(self.context, [(f"input.{i}", tensor) for i, tensor in enumerate(tensors)])

    def content(self, piece: tuple[int, int, int, bool]) -> bytes:
        return ctypes.string_at(self.address + piece[0] % self.size, piece[1])


def test_a_plain_tensor_becomes_a_slot_a_piece_and_bytes() -> None:
    ring = HandRing()
    tensor = torch.tensor([[1.0, 2.0, 3.0]], requires_grad=True)
    assert ring.take(tensor) == [SlotEvent("input.0", "float32", (1, 3), grad=True, token=0)]
    assert ring.pieces == [(0, 12, 0, True)]
    assert ring.content(ring.pieces[0]) == tensor.detach().numpy().tobytes()
    assert list(ring.state) == [64, 4096, 4096, 1, 12]


@pytest.mark.parametrize(
    "nbytes", [0, 1, 63, 64, 65, 256 * 1024 - 1, 256 * 1024, 256 * 1024 + 1, 256 * 1024 + 63, 1 << 20]
)
@pytest.mark.parametrize("offset", [0, 1])
def test_copies_of_every_size_stop_where_they_should(nbytes: int, offset: int) -> None:
    """Large ones go another way, past the caches; nothing may be touched before or behind the place."""
    ring = HandRing(4 << 20)
    ctypes.memset(ring.address, 0xA5, ring.size)
    ring.state[HEAD] = 128
    tensor = random_bytes(nbytes + offset)[offset:]
    assert ring.take(tensor)[0] is not None
    assert ring.content(ring.pieces[0]) == tensor.numpy().tobytes()
    assert ctypes.string_at(ring.address, 128) == b"\xa5" * 128
    assert ctypes.string_at(ring.address + 128 + nbytes, 256) == b"\xa5" * 256


def test_a_tensor_that_does_not_fit_behind_goes_to_the_front() -> None:
    ring = HandRing()
    ring.state[HEAD], ring.state[FREE_TO] = 4096 * 7 - 128, 4096 * 8
    assert None not in ring.take(torch.zeros(32), torch.ones(1), torch.zeros(0), torch.ones(16))
    assert [piece[:2] for piece in ring.pieces] == [
        (4096 * 7 - 128, 128),
        (4096 * 7, 4),
        (4096 * 7 + 64, 0),
        (4096 * 7 + 64, 64),
    ]
    ring.state[HEAD] = 4096 * 7 - 64
    assert ring.take(torch.ones(17)) != [None]
    assert ring.pieces[-1][:2] == (4096 * 7, 68)
    assert ring.content(ring.pieces[-1]) == torch.ones(17).numpy().tobytes()


@pytest.mark.parametrize(
    ("place", "number"),
    [(FREE_TO, 63), (POPULATED, 63), (FREE_TO, -1), (HEAD, -64), (HEAD, FOR_EVER - 63), (HEAD, FOR_EVER)],
    ids=["full", "not populated", "closed", "before the start", "near the end of numbers", "at the end of numbers"],
)
def test_where_there_is_no_room_python_is_asked(place: int, number: int) -> None:
    ring = HandRing()
    ring.state[place] = number
    before = list(ring.state)
    assert ring.take(torch.zeros(1), torch.zeros(16)) == [None, None]
    assert (ring.pieces, list(ring.state)) == ([], before)


def test_a_closed_ring_takes_not_even_an_empty_tensor() -> None:
    ring = HandRing()
    ring.state[FREE_TO] = -1
    assert ring.take(torch.zeros(0)) == [None]


def test_a_tensor_too_large_is_left_out_and_the_next_is_taken() -> None:
    ring = HandRing(largest=1000)
    slots = ring.take(torch.zeros(1001, dtype=torch.uint8), torch.zeros(1000, dtype=torch.uint8))
    assert [slot is None for slot in slots] == [True, False]
    assert (slots[1].token, ring.pieces) == (0, [(0, 1000, 5, True)])


def test_a_view_without_memory_is_not_read() -> None:
    """Its address is its offset: reading there would end the process."""
    flat = torch.zeros(1000)
    view = flat[500:]
    flat.untyped_storage().resize_(0)
    assert torch_names.address_of(view) == 2000
    assert HandRing().take(flat, view, torch._efficientzerotensor((4,))[2:]) == [None, None, None]


def test_parameters_are_taken_and_subclasses_are_left_to_python() -> None:
    ring = HandRing()
    parameter = nn.Parameter(torch.ones(2))
    other = torch.ones(2).as_subclass(type("Other", (Tensor,), {}))
    assert ring.take(parameter, other) == [SlotEvent("input.0", "float32", (2,), grad=True, token=0), None]


def test_tensors_of_every_kind_are_named_without_a_walk() -> None:
    chosen = (torch.ones(1), nn.Parameter(torch.ones(1)), torch.ones(1).as_subclass(type("Other", (Tensor,), {})))
    tensors: list[Any] = []
    tree = native.flatten(chosen, flatten._INPUTS, flatten._REFERENCES, Tensor, tensors, pytest.fail)
    assert tree == flatten._REFERENCES[:3]
    assert [(name, id(tensor)) for name, tensor in tensors] == [(f"input.{i}", id(one)) for i, one in enumerate(chosen)]


class Pretender:
    """What the C code asks of a tensor, and a place to be rude."""

    dtype, is_cpu, requires_grad = "int8", True, False
    shape = property(lambda self: tuple(range(3, 4)))  # a new one each time, which can be lost
    content = ctypes.create_string_buffer(b"abc")
    is_neg = is_conj = lambda self: False
    is_contiguous = lambda self: True  # noqa: E731
    numel = lambda self: 3  # noqa: E731
    storage_offset = lambda self: 0  # noqa: E731

    def const_data_ptr(self) -> int:
        return ctypes.addressof(self.content)


DTYPE_OF_PRETENDER = {"int8": ("int8", 4, 1, False)}


def pretend(**changes: Any) -> tuple[HandRing, Any]:
    kind = type("Changed", (Pretender,), changes)
    return HandRing(tensor_type=kind, dtypes=DTYPE_OF_PRETENDER), kind()


def failing(error: type[BaseException]) -> Callable[..., Any]:
    def fail(self: Any) -> Any:
        raise error("on purpose")

    return fail


ATTRIBUTES = ("dtype", "is_cpu", "shape", "requires_grad")
METHODS = ("is_contiguous", "is_neg", "is_conj", "const_data_ptr", "numel")


def test_the_pretender_is_taken_when_it_behaves() -> None:
    ring, tensor = pretend()
    assert ring.take(tensor) == [SlotEvent("input.0", "int8", (3,), token=0)]
    assert ring.content(ring.pieces[0]) == b"abc"


@pytest.mark.parametrize("name", ATTRIBUTES + METHODS)
def test_whatever_fails_is_left_to_python_and_an_interrupt_is_not(name: str) -> None:
    for error in (RuntimeError, KeyboardInterrupt):
        fail = failing(error)
        ring, tensor = pretend(**{name: property(fail) if name in ATTRIBUTES else fail})
        if error is RuntimeError:
            assert ring.take(tensor, tensor) == [None, None]
        else:
            with pytest.raises(KeyboardInterrupt):
                ring.take(tensor)
        assert (ring.pieces, list(ring.state)) == ([], [0, 4096, 4096, 0, 0])


@pytest.mark.parametrize("count", [-1, 2**62, 2**63, 2**64 - 1, 2**64, 1.5, None])
def test_a_senseless_number_of_elements_is_left_to_python(count: Any) -> None:
    ring, tensor = pretend(numel=lambda self: count)
    assert ring.take(tensor) == [None]
    assert ring.pieces == []


def interfering(action: Callable[[HandRing], None]) -> tuple[HandRing, Any]:
    """A tensor that does something to the ring while it is looked at."""
    rings: list[HandRing] = []

    def requires_grad(self: Any) -> bool:
        action(rings[0])
        return False

    ring, tensor = pretend(requires_grad=property(requires_grad))
    rings.append(ring)
    return ring, tensor


@pytest.mark.parametrize(("place", "number"), [(HEAD, 64), (TOKENS, 1), (FREE_TO, -1), (POPULATED, 0)])
def test_code_that_runs_in_between_does_not_confuse_the_ring(place: int, number: int) -> None:
    """Making an object may start the garbage collector, and that any code: it may take, or close."""
    ring, tensor = interfering(lambda ring: ring.state.__setitem__(place, number))
    assert ring.take(tensor) == [None]
    assert ring.pieces == []


def test_pieces_sent_in_between_do_not_take_the_next_one_with_them() -> None:
    ring, tensor = interfering(lambda ring: setattr(ring, "pieces", []))
    assert None not in ring.take(tensor, tensor)
    assert ring.pieces == [(64, 3, 4, True)]


def test_pieces_that_take_nothing_leave_the_ring_as_it_was() -> None:
    ring = HandRing()
    ring.pieces = ()  # type: ignore[assignment]
    assert ring.take(torch.zeros(1)) == [None]
    assert list(ring.state) == [0, 4096, 4096, 0, 0]


def test_a_list_that_shrinks_meanwhile_is_not_read_beyond_its_end() -> None:
    ring, tensor = pretend(requires_grad=property(lambda self: named.clear()))
    named = [("input.0", tensor), ("input.1", tensor)]
    assert [slot is None for slot in native.take(ring.context, named)] == [False, True]


def test_what_is_no_pair_is_left_to_python() -> None:
    ring = HandRing()
    assert (
        native.take(ring.context, [None, (), ("input.0",), ["input.0", torch.zeros(1)], ("input.0", 3)]) == [None] * 5
    )


def grown_bytes(action: Callable[[], Any], times: int = 10_000) -> int:
    """How much more memory Python holds after so many times than after a few."""
    for _ in range(50):
        action()
    gc.collect()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(times):
            action()
        gc.collect()
        return tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()


def leaky() -> dict[str, Callable[[], Any]]:
    """Ways through the C code, each by its name."""
    ring, closed = HandRing(), HandRing()
    closed.state[FREE_TO] = -1
    plain, turned, parameter = torch.zeros(4), torch.zeros(2, 3).t(), nn.Parameter(torch.zeros(4))
    rude = [pretend(**{name: failing(ValueError)}) for name in METHODS]
    rude += [pretend(**{name: property(failing(ValueError))}) for name in ATTRIBUTES]
    arguments = (plain, 1, None, 2.5, "x", [plain], (parameter,), 10**30, float("nan"))

    def take() -> None:
        ring.state[HEAD] = 0
        ring.take(plain, turned, parameter, 3)
        ring.pieces.clear()

    def refuse() -> None:
        for one, tensor in rude:
            one.take(tensor)

    def walk_fails(*_: Any) -> None:
        raise ValueError

    def flatten_fails() -> None:
        with pytest.raises(ValueError):
            native.flatten(arguments, flatten._INPUTS, flatten._REFERENCES, Tensor, [], walk_fails)

    def make_context(tensor_type: type = Tensor) -> None:
        native.context(
            tensor_type, nn.Parameter, _DTYPES, SlotEvent, ring, ring.address, 64, ring.state.buffer_info()[0], 64
        )

    def context_fails() -> None:
        with pytest.raises(TypeError):
            make_context(int)

    return {
        "take": take,
        "closed": lambda: closed.take(plain, parameter),
        "refuse": refuse,
        "context": make_context,
        "context fails": context_fails,
        "flatten": lambda: flatten.flatten_arguments(arguments, {}, []),
        "flatten fails": flatten_fails,
    }


@pytest.mark.parametrize("way", list(leaky()))
def test_nothing_is_leaked(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flatten, "fast", native)
    action = leaky()[way]
    assert (
        grown_bytes(action, 10_000 if way in ("take", "closed", "flatten") else 1_000) < 16_000
    )  # one small object lost each time would be more


def test_references_are_given_back() -> None:
    """Of every object that goes in, also of the ones that are never freed and whose loss no count of bytes would show."""
    ring = HandRing()
    tensor, name, names, references = (
        torch.zeros(4),
        "".join(["in", "put"]),
        ["".join(["na", "me"])],
        [{"slot": "name"}],
    )
    watched = [tensor, name, names[0], references[0], ring, ring.pieces, ring.context, Tensor, nn.Parameter]
    watched += [torch.float32, _DTYPES[torch.float32], *_DTYPES[torch.float32], None, True, False, Tensor.numel]
    # From Python 3.12 on nobody frees some objects, and Python itself does not count who holds them.
    watched = [one for one in watched if sys.getrefcount(one) < 2**30]
    for _ in range(2):
        before = [sys.getrefcount(one) for one in watched]
        for _ in range(10_000):
            ring.state[HEAD] = ring.state[TOKENS] = 0
            native.take(ring.context, [(name, tensor), (name, None), (name, ring)])
            ring.pieces.clear()
            native.flatten((tensor,), names, references, Tensor, [], print)
        grown = [sys.getrefcount(one) - count for one, count in zip(watched, before, strict=True)]
    assert max(map(abs, grown)) < 100


def test_a_context_keeps_its_owner_and_lets_it_go() -> None:
    ring = HandRing()
    watched = [ring, Tensor, nn.Parameter, Tensor.is_contiguous, Tensor.storage_offset]
    before = [sys.getrefcount(one) for one in watched]
    more = native.context(
        Tensor, nn.Parameter, _DTYPES, SlotEvent, ring, ring.address, 64, ring.state.buffer_info()[0], 64
    )
    assert [sys.getrefcount(one) for one in watched] == [count + 1 for count in before]
    del more
    assert [sys.getrefcount(one) for one in watched] == before


def with_argument(place: int, value: Any) -> list[Any]:
    ring = HandRing()
    arguments = [Tensor, nn.Parameter, _DTYPES, SlotEvent, ring, ring.address, 4096, ring.state.buffer_info()[0], 1024]
    arguments[place] = value
    return arguments


@pytest.mark.parametrize(
    ("place", "value", "error"),
    [
        (0, "Tensor", TypeError), (0, object, TypeError), (1, None, TypeError), (2, [], TypeError), (3, "Slot", TypeError),
        (4, object(), TypeError), (4, SimpleNamespace(pieces=()), TypeError), (5, 0, ValueError), (5, -64, ValueError),
        (5, 65, ValueError), (5, 2**80, ValueError), (5, "0", TypeError), (6, 0, ValueError), (6, 100, ValueError),
        (6, -64, ValueError), (6, 2**62, ValueError), (7, 0, ValueError), (7, -8, ValueError), (7, 12, ValueError),
        (8, -1, ValueError), (8, 4097, ValueError), (8, 1.5, TypeError),
        (2, {torch.int8: None}, ValueError), (2, {torch.int8: ("int8", 4)}, ValueError),
        (2, {torch.int8: ("int8", 4, 0)}, ValueError), (2, {torch.int8: ("int8", 4, 2**70)}, ValueError), (2, {1: (1, 4, 1)}, ValueError),
    ],
)  # fmt: skip
def test_a_context_of_wrong_arguments_is_refused(place: int, value: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        native.context(*with_argument(place, value))


def test_wrong_arguments_are_refused() -> None:
    ring = HandRing()
    calls: list[tuple[Callable[..., Any], tuple[Any, ...], type[Exception]]] = [
        (native.context, (), TypeError),
        (native.take, (), TypeError),
        (native.take, (ring.context,), TypeError),
        (native.take, (ring.context, ()), TypeError),
        (native.take, (None, []), ValueError),
        (native.flatten, (), TypeError),
        (native.flatten, ([], [], [], Tensor, [], print), TypeError),
        (native.flatten, ((), (), [], Tensor, [], print), TypeError),
        (native.flatten, ((), [], [], "Tensor", [], print), TypeError),
        (native.flatten, ((), [], [], Tensor, (), print), TypeError),
        (native.flatten, ((), [], [], Tensor, [], None), TypeError),
        (native.flatten, ((torch.zeros(1),), [], [{}], Tensor, [], print), ValueError),
        (native.flatten, ((torch.zeros(1),), ["input.0"], [], Tensor, [], print), ValueError),
        (native.flatten, (([],), [], [], Tensor, [], print), ValueError),
    ]
    for function, arguments, error in calls:
        with pytest.raises(error):
            function(*arguments)


def test_names_that_vanish_while_a_value_is_walked_are_missed() -> None:
    names = ["input.0", "input.1"]
    with pytest.raises(ValueError, match="more values than names"):
        native.flatten(([], torch.zeros(1)), names, [{}, {}], Tensor, [], lambda *_: names.clear())
