"""Runs the C loops of capture, built with sanitizers, over objects that look like tensors; tools/sanitize.sh starts it.

    exercise_fast.py LOOPS.so              everything; exits non-zero when a slot, a piece or a byte is wrong
    exercise_fast.py LOOPS.so --overread   a tensor that says it has one byte more than it has: the sanitizer must end the process

Torch is not needed. Each tensor, and the ring, stand in blocks of exactly their size from the allocator of the sanitizer,
so that one byte too far is seen, at either end.
"""

from __future__ import annotations

import ctypes
import random
import sys
from array import array
from collections.abc import Callable
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_loader
from types import FrameType, ModuleType, SimpleNamespace
from typing import Any

RING_BYTES = 2 << 20
ALIGNMENT = 64
LARGE_BYTES = 256 * 1024
FOR_EVER = 2**63 - 1
HEAD, FREE_TO, POPULATED, TOKENS, BYTES_SEEN = range(5)
DTYPES = {size: (f"bits{8 * size}", size, size, False) for size in (1, 2, 4, 8, 16)}

libc = ctypes.CDLL(None)
libc.malloc.restype = libc.aligned_alloc.restype = ctypes.c_void_p
libc.malloc.argtypes = [ctypes.c_size_t]
libc.aligned_alloc.argtypes = [ctypes.c_size_t, ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]


class Rude(Exception):
    """Raised by a tensor that does not answer."""


class Block:
    """A tensor of `count` elements of `dtype` bytes, in memory of its own that begins at an odd place."""

    rude: frozenset[str] = frozenset()

    def __init__(self, dtype: int, count: int, *, offset: int = 0, content: bytes = b"") -> None:
        self.content = content or random.Random(count).randbytes(dtype * count)
        self._room = libc.malloc(offset + len(self.content))
        self._address = self._room + offset
        ctypes.memmove(self._address, self.content, len(self.content))
        self._dtype, self._count = dtype, count

    def __del__(self) -> None:
        libc.free(self._room)

    def _answer(self, name: str, value: Any) -> Any:
        if name in self.rude:
            raise Rude(name)
        return value

    dtype = property(lambda self: self._answer("dtype", self._dtype))
    is_cpu = property(lambda self: self._answer("is_cpu", True))
    shape = property(lambda self: self._answer("shape", (self._count,)))
    requires_grad = property(lambda self: self._answer("requires_grad", False))

    def is_contiguous(self) -> bool:
        return self._answer("is_contiguous", True)

    def is_neg(self) -> bool:
        return self._answer("is_neg", False)

    def is_conj(self) -> bool:
        return self._answer("is_conj", False)

    def const_data_ptr(self) -> int:
        return self._answer("const_data_ptr", self._address)

    def numel(self) -> int:
        return self._answer("numel", self._count)

    def storage_offset(self) -> int:
        return self._answer("storage_offset", 0)


ANSWERS = [name for name in vars(Block) if not name.startswith("_") and name not in ("rude", "storage_offset")]


class Fields(tuple):  # type: ignore[type-arg]
    """A slot: what it was made of."""

    def __new__(cls, *fields: Any) -> Fields:
        return super().__new__(cls, fields)


class Parameter(Block):
    """The other type that is taken."""


class Owner:
    """A ring in memory of exactly its size, and the pieces in it."""

    def __init__(self, loops: ModuleType, size: int = RING_BYTES) -> None:
        self.loops, self.size = loops, size
        self.address = libc.aligned_alloc(ALIGNMENT, size)
        self.pieces: list[tuple[int, int, int, bool]] = []
        self.state = array("q", [0, FOR_EVER, size, 0, 0])

    def context(self, **changes: Any) -> Any:
        values = {
            "tensor_type": Block,
            "parameter_type": Parameter,
            "dtypes": DTYPES,
            "slot_type": Fields,
            "owner": self,
            "ring": self.address,
            "size": self.size,
            "state": self.state.buffer_info()[0],
            "largest": self.size // 4,
        }
        return self.loops.context(*{**values, **changes}.values())

    def close(self) -> None:
        libc.free(self.address)


def demand(condition: bool, what: str) -> None:
    if not condition:
        sys.exit(f"wrong: {what}")


def check_copies(owner: Owner) -> int:
    """Every size of element and many counts, at odd addresses, at the end of the ring and across it; the number of tensors."""
    context, done = owner.context(), 0
    counts = [*range(67), 1000, LARGE_BYTES - 1, LARGE_BYTES, LARGE_BYTES + 1, LARGE_BYTES + 65, owner.size // 4]
    for size, row in DTYPES.items():
        for at, count in enumerate(counts if size == 1 else counts[:-5]):
            kind = Parameter if at % 2 else Block
            tensor = kind(size, count, offset=at % 17)
            room = -(-len(tensor.content) // ALIGNMENT) * ALIGNMENT
            for head in (0, owner.size - room, owner.size - ALIGNMENT, 7 * owner.size + ALIGNMENT):
                owner.state[HEAD] = head
                token = owner.state[TOKENS]
                slots = owner.loops.take(context, [("input.0", tensor)])
                place = head if head % owner.size + room <= owner.size else owner.size
                demand(slots == [("input.0", row[0], (count,), "cpu", None, False, token)], f"slot {slots}")
                demand(owner.pieces == [(place, len(tensor.content), size, True)], f"pieces {owner.pieces} at {head}")
                found = ctypes.string_at(owner.address + place % owner.size, len(tensor.content))
                demand(found == tensor.content, f"{count} elements of {size} bytes at {head}")
                demand(owner.state[HEAD] == place + room, "head")
                owner.pieces = []
                done += 1
    return done


def check_refusals(owner: Owner) -> int:
    """Tensors that raise, senseless numbers and states: nothing is copied, nothing is changed; the number of them."""
    context, done = owner.context(), 0
    tensors: list[Any] = [None, 3, Block(3, 1), type("Other", (Block,), {})(1, 1)]
    for count in (-1, owner.size // 4 + 1, 2**60, 2**63, 2**64 - 1, 2**64, "many"):
        tensors.append(Block(1, 0))
        tensors[-1]._count = count
    for address in (0, -1, 2**64):
        tensors.append(Block(1, 1))
        tensors[-1]._address = address
    for state in ((HEAD, -64), (HEAD, FOR_EVER), (HEAD, FOR_EVER - RING_BYTES), (FREE_TO, -1), (POPULATED, 0)):
        before = owner.state[state[0]]
        owner.state[state[0]] = state[1]
        demand(owner.loops.take(context, [("input.0", Block(1, 1))]) == [None], f"state {state} was not refused")
        owner.state[state[0]] = before
        done += 1
    before_all = list(owner.state)
    for tensor in tensors:
        demand(owner.loops.take(context, [("input.0", tensor), None]) == [None, None], f"{tensor} was not refused")
        done += 1
    for name in ANSWERS:
        Block.rude = frozenset([name])
        demand(owner.loops.take(context, [("input.0", Block(1, 1))]) == [None], f"a failing {name} was not refused")
        done += 1
    Block.rude = frozenset()
    demand(owner.pieces == [] and list(owner.state) == before_all, "a refusal left something behind")
    return done


def refused(function: Callable[..., Any], *args: Any, **changes: Any) -> bool:
    try:
        function(*args, **changes)
    except (AttributeError, TypeError, ValueError, Rude):
        return True
    return False


def check_contexts(owner: Owner) -> None:
    """Each argument wrong in turn."""
    wrong: list[dict[str, Any]] = [{"tensor_type": 3}, {"tensor_type": int}, {"parameter_type": None}, {"dtypes": []}]
    wrong += [{"dtypes": {1: row}} for row in (None, (), ("bits8", 1), ("bits8", 1, 0), ("bits8", 1, 2**70), (1, 1, 1))]
    wrong += [{"owner": 3}, {"ring": 0}, {"ring": 8}, {"ring": 2**64}, {"size": 100}, {"size": 0}, {"size": 2**63 - 64}]
    wrong += [{"state": 0}, {"state": 4}, {"state": -8}, {"largest": -1}, {"largest": owner.size + 1}, {"largest": "1"}]
    for change in wrong:
        demand(refused(owner.context, **change), f"a context with {change} was not refused")


def check_flatten(loops: ModuleType) -> None:
    names, references = [f"input.{i}" for i in range(9)], [{"slot": f"input.{i}"} for i in range(9)]
    values = (Block(1, 3), None, True, 2**62, 2**70, 1.5, float("nan"), "word", [Parameter(2, 1)])
    for _ in range(300):
        tensors: list[Any] = []
        tree = loops.flatten(
            values, names, references, Block, tensors, lambda value, name, into: into.append((name, value))
        )
        demand(tree == [{"slot": "input.0"}, None, True, 2**62, None, 1.5, None, "word", None], f"tree {tree}")
        demand([name for name, _ in tensors] == ["input.0", "input.4", "input.6", "input.8"], f"names {tensors}")

    def fail(*_: Any) -> None:
        raise Rude

    demand(refused(loops.flatten, values, names, references, Block, [], fail), "a walk that fails")
    demand(refused(loops.flatten, values, names[:1], references, Block, [], print), "names that are missing")
    demand(refused(loops.flatten, values, names, references, Block, [], lambda *_: names.clear()), "names that vanish")
    demand(refused(loops.flatten, values, names, references, Block, ()), "too few arguments")


def check_interference(owner: Owner) -> None:
    """A tensor that empties the very list it came in, and one that closes the ring while it is looked at."""

    class Meddling(Block):
        shape = property(lambda self: self.action() or (1,))

    meddling = Meddling(1, 1)
    context = owner.context(tensor_type=Meddling)
    named = [("input.0", meddling), ("input.1", meddling)]
    meddling.action = named.clear  # type: ignore[attr-defined]
    demand([slot is None for slot in owner.loops.take(context, named)] == [False, True], "a list that shrinks")
    meddling.action = lambda: owner.state.__setitem__(FREE_TO, -1)  # type: ignore[attr-defined]
    demand(owner.loops.take(context, [("input.0", meddling)]) == [None], "a ring that is closed meanwhile")


def check_stacks(loops: ModuleType) -> None:
    """Deeper than the room that a walk begins with, and more code than the table that a walker begins with."""
    walker, met = loops.walker(FrameType), []

    def deeper(left: int) -> bytes:
        if left:
            return deeper(left - 1)
        return loops.walk(walker, sys._getframe(), None, b"", lambda code: met.append(code) or True)  # type: ignore[no-any-return]

    for depth in (0, 1, 126, 127, 128, 129, 500):
        demand(len(deeper(depth)) >= 16 * (depth + 1), f"a stack of {depth}")
    for number in range(600):
        names: dict[str, Any] = {"sys": sys}
        exec(f"def frame_{number}(): return sys._getframe()", names)
        met.append(names[f"frame_{number}"].__code__)
        inner = loops.walk(walker, names[f"frame_{number}"](), None, b"", lambda code: True)
        demand(len(inner) in (16, 64), f"a frame that has returned: {len(inner)}")
    key = loops.walk(walker, sys._getframe(), sys._getframe().f_back, b"outer", lambda code: True)
    demand(key.endswith(b"outer") and len(key) == 21, "an end")
    demand(refused(loops.walk, walker, 3, None, b"", print), "no frame")
    demand(refused(loops.walk, loops.walker(FrameType), sys._getframe(), None, b"", lambda code: int("x")), "a failure")


def check_roles(loops: ModuleType) -> None:
    """What is known of a tensor may be anything, and asking may take it away."""

    class Slot:
        role = ""

    class Module:
        def __init__(self, held: Any) -> None:
            self._parameters, self._buffers = {"w": held}, {}

    tensor = Block(1, 1)
    known: dict[int, Any] = {}
    owned = (lambda: (known.clear(), Module(tensor))[1], "w", "w", False, False, "parameter w")
    for entry, role in ((owned, "parameter w"), (({"k": tensor}, "k", "state"), "state"), ((), ""), (3, "")):
        for tables in ((known, None), ({}, lambda key: known)):
            known[id(tensor)] = entry
            slot = Slot()
            loops.mark(*tables, [("input.0", tensor), ("input.1", tensor)], [slot, Slot()])
            demand(slot.role == role, f"role {slot.role} of {entry}")
    gone = (lambda: None, "w", "w", True, False, "gradient w")
    loops.mark({id(tensor): gone}, None, [("input.0", tensor)], [None])
    demand(refused(loops.mark, {id(tensor): owned}, None, [("input.0", tensor)], [3]), "a slot without a role")
    demand(refused(loops.mark, {}, lambda key: 3, [("input.0", tensor)], [None]), "no table")


def check_mode(loops: ModuleType) -> None:
    """Calls that end well, that raise, and that are left to the method."""
    c_attribute = ctypes.pythonapi.PyObject_GetAttrString
    c_attribute.restype, c_attribute.argtypes = ctypes.py_object, [ctypes.py_object, ctypes.c_char_p]
    left: list[Any] = []

    class Handling:
        fails = ""

        def _step(self, name: str) -> None:
            if self.fails == name:
                raise Rude(name)

        def _before(self, *_: Any) -> Any:
            self._step("before")
            return None if self.fails == "unwanted" else object()

        def _finish(self, *_: Any) -> None:
            self._step("finish")

        def _raised(self, *_: Any) -> None:
            self._step("raised")

    class Base:
        quick: Any = None

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            left.append(func)
            return func(*args, **(kwargs or {}))

    class Plan:
        is_plain = True

    class Session:
        recording, state = True, SimpleNamespace(busy=False)

    def no() -> bool:
        return False

    mode, handling, nothing = loops.mode_type(Base)(), Handling(), object()
    handler = c_attribute(mode, b"__torch_function__")
    demand(handler.__self__ is mode and mode.__torch_function__.__func__ is Base.__torch_function__, "two doors")
    demand(c_attribute(mode, b"quick") is None, "another attribute")
    plans = {len: Plan(), int: Plan(), abs: nothing}
    for fails in ("", "unwanted", "before", "finish", "raised"):
        handling.fails = fails
        mode.quick = (plans, nothing, Session(), handling, no, no, None)
        for _ in range(50):
            for func, args, kwargs in (
                (len, ("abc",), None),
                (int, ("x",), {}),
                (abs, (-3,), None),
                (max, (1, 2), None),
            ):
                try:
                    demand(handler(func, (), args, kwargs) in (3, 2), f"a result of {func}")
                except ValueError as error:
                    demand(func is int and fails not in ("before", "raised"), f"{error!r} from {func}")
                except Rude as error:
                    demand(func is len or func is int, f"{error!r} from {func}")
    demand(set(left) == {max}, f"left to the method: {set(left)}")
    for wrong in (None, (), (3, nothing, 0, None, no, no, None)):
        mode.quick = wrong
        demand(handler(len, (), ("ab",), None) == 2 and left[-1] is len, f"{wrong} as what is quick")
    demand(refused(handler) and refused(handler, 1, 2, 3, 4, 5) and refused(loops.mode_type, 3), "senseless calls")


def load(path: str) -> ModuleType:
    loader = ExtensionFileLoader("_fast", path)
    spec = spec_from_loader("_fast", loader)
    assert spec is not None
    module = module_from_spec(spec)
    loader.exec_module(module)
    return module


def main() -> None:
    loops = load(sys.argv[1])
    owner = Owner(loops)
    if "--overread" in sys.argv:
        tensor = Block(1, 64)
        tensor._count = 65
        loops.take(owner.context(), [("input.0", tensor)])
        sys.exit(0)
    taken, left = check_copies(owner), check_refusals(owner)
    check_contexts(owner)
    check_flatten(loops)
    check_interference(owner)
    check_stacks(loops)
    check_roles(loops)
    check_mode(loops)
    owner.close()
    print(f"{taken} tensors taken, {left} left to Python")


if __name__ == "__main__":
    main()
