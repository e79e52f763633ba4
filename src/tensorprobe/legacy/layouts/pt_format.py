"""What a file of `torch.save` holds, read without running any of it.

In: the content of a file, trusted in nothing. Out: the description of its one tensor and the bytes of its storage, or
TensorDamaged. The archive is read by `zipfile`, the description by `pickletools`: a small stack machine follows the
opcodes and knows only those that describe a tensor; it can call nothing but the functions below. Files of torch before
1.6, which are no archives, are read as well. Time and memory are bounded by the size of the file.
"""

from __future__ import annotations

import io
import math
import pickletools
import zipfile
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any, NamedTuple

from tensorprobe.errors import TensorDamaged
from tensorprobe.model import DTYPES

STORAGES = {
    "float32": "Float",
    "float64": "Double",
    "float16": "Half",
    "bfloat16": "BFloat16",
    "int8": "Char",
    "uint8": "Byte",
    "int16": "Short",
    "int32": "Int",
    "int64": "Long",
    "bool": "Bool",
    "complex64": "ComplexFloat",
    "complex128": "ComplexDouble",
}
"""dtype → what torch calls its storage. Other dtypes have storages without a type."""

_TYPES = {f"{storage}Storage": dtype for dtype, storage in STORAGES.items()} | {"UntypedStorage": ""}
_MAX_DESCRIPTION = 1 << 16
_MAX_READ = 1 << 17
"""The most that is read of an archive's directory; one tensor needs less than a kilobyte."""
_LOCAL_HEADER = 30
_MAGIC = 0x1950A86A20F9469CFC6C
"""How files of torch before 1.6 begin."""
_SHOWN = 120
_CONVERT = "If you trust it, save it again as one plain tensor: torch.save(torch.load(file).contiguous(), file)"
_OTHER_KINDS = {
    "_rebuild_sparse_tensor": "a sparse tensor",
    "_rebuild_sparse_csr_tensor": "a sparse tensor",
    "_rebuild_qtensor": "a quantized tensor",
    "_rebuild_nested_tensor": "a nested tensor",
    "_rebuild_wrapper_subclass": "a tensor of a class of its own",
    "_rebuild_meta_tensor_no_storage": "a tensor without values",
}


class SavedTensor(NamedTuple):
    """One tensor as its file describes it. `nbytes` is the size of its storage, `key` the storage's name."""

    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    key: str
    nbytes: int
    conjugated: bool = False
    negated: bool = False

    @property
    def is_row_major(self) -> bool:
        """Whether its elements stand one behind the other in the storage, as they are."""
        expected = 1
        for size, step in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if size != 1 and step != expected:
                return False
            expected *= size
        return not (self.conjugated or self.negated)


class Saved(NamedTuple):
    """A tensor, and the bytes of its storage in the file."""

    tensor: SavedTensor
    storage: memoryview
    big_endian: bool


def read_saved(content: memoryview) -> Saved:
    """Return the one tensor in a file; TensorDamaged when it is not sound or holds anything else."""
    saved = _read_archive(content) if bytes(content[:4]) == b"PK\3\4" else _read_before_archives(content)
    tensor = saved.tensor
    if len(saved.storage) != tensor.nbytes:
        raise TensorDamaged(f"its file holds {len(saved.storage):,} bytes of values; {tensor.nbytes:,} are described")
    itemsize = DTYPES[tensor.dtype].itemsize
    reach = tensor.offset + 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride, strict=True))
    if math.prod(tensor.shape) and reach * itemsize > tensor.nbytes:
        raise TensorDamaged(f"its file holds {tensor.nbytes:,} bytes of values; {reach * itemsize:,} are needed")
    return saved


def describe_saved(content: memoryview) -> tuple[str, tuple[int, ...]]:
    """Return dtype and shape of the one tensor in a file. Fails as `read_saved`."""
    tensor = read_saved(content).tensor
    return tensor.dtype, tensor.shape


def _read_archive(content: memoryview) -> Saved:
    try:
        with zipfile.ZipFile(_Window(content)) as archive:
            entries = {entry.filename.partition("/")[2]: entry for entry in archive.infolist()}
    except (zipfile.BadZipFile, ValueError, NotImplementedError, OSError, EOFError) as error:
        raise TensorDamaged(f"its file is not a sound archive: {error}") from None
    if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries.values()):
        raise TensorDamaged("its file is a compressed archive, which torch.save never writes")
    if "data.pkl" not in entries:
        raise TensorDamaged(f"its file is an archive without data.pkl, not one of torch.save. {_CONVERT}")
    order = bytes(_stored(content, entries["byteorder"])[:8]) if "byteorder" in entries else b"little"
    text = _stored(content, entries["data.pkl"])
    if len(text) > _MAX_DESCRIPTION:
        raise TensorDamaged(f"its file describes its content in {len(text):,} bytes; no tensor needs that. {_CONVERT}")
    tensor = describe_tensor(bytes(text))
    entry = entries.get(f"data/{tensor.key}")
    if entry is None:
        raise TensorDamaged(f"its file has no values: storage {tensor.key[:20]!r} is not in the archive")
    return Saved(tensor, _stored(content, entry), big_endian=order == b"big")


class _Window(io.RawIOBase):
    """Content as a file, of which only small parts can be read: the directory of an archive cannot fill the memory."""

    def __init__(self, content: memoryview) -> None:
        self._content, self._at = content, 0

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = max(0, offset + (0, self._at, len(self._content))[whence])
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, size: int = -1) -> bytes:
        wanted = len(self._content) - self._at if size is None or size < 0 else size
        if wanted > _MAX_READ:
            raise ValueError(f"{wanted:,} bytes of directory")
        part = bytes(self._content[self._at : self._at + wanted])
        self._at += len(part)
        return part


def _stored(content: memoryview, entry: zipfile.ZipInfo) -> memoryview:
    """The bytes of a file that is stored in the archive as it is."""
    at, length = entry.header_offset, entry.file_size
    local = bytes(content[at : at + _LOCAL_HEADER])
    if at < 0 or len(local) < _LOCAL_HEADER or local[:4] != b"PK\3\4" or entry.flag_bits & 1:
        raise TensorDamaged(f"its file is not a sound archive: no {entry.filename[:_SHOWN]!r} where it should be")
    start = at + _LOCAL_HEADER + int.from_bytes(local[26:28], "little") + int.from_bytes(local[28:30], "little")
    if start + length > len(content):
        raise TensorDamaged(f"its file is not a sound archive: {entry.filename[:_SHOWN]!r} goes beyond its end")
    return content[start : start + length]


def _read_before_archives(content: memoryview) -> Saved:
    """Five pickles in a row (a number, a version, the machine, the tensor, names of storages), then the storages."""
    head = io.BytesIO(content[:_MAX_DESCRIPTION])
    if bytes(content[:1]) != b"\x80":
        raise TensorDamaged("its file is not one of torch.save")
    first = _run(head)
    if first != _MAGIC:
        raise TensorDamaged(f"its file holds {_kind(first)}, not one of torch.save's tensors. {_CONVERT}")
    _run(head), _run(head)
    tensor, keys = _demand_tensor(_run(head)), _run(head)
    if keys != [tensor.key]:
        raise TensorDamaged(f"its file holds several storages. {_CONVERT}")
    start = head.tell() + 8
    return Saved(tensor, content[start : start + tensor.nbytes], big_endian=False)


@lru_cache(maxsize=4096)
def describe_tensor(text: bytes) -> SavedTensor:
    """Return the tensor that a whole pickle describes; TensorDamaged when it describes anything else."""
    stream = io.BytesIO(text)
    tensor = _demand_tensor(_run(stream))
    if stream.tell() != len(text):
        raise TensorDamaged(f"its file has more behind the description of its tensor. {_CONVERT}")
    return tensor


def _demand_tensor(found: object) -> SavedTensor:
    if not isinstance(found, SavedTensor):
        raise TensorDamaged(f"its file holds something else than a plain tensor: {_kind(found)}. {_CONVERT}")
    return found


class _Name(NamedTuple):
    """A name that a description mentions; nothing is imported for it."""

    module: str
    name: str


class _Storage(NamedTuple):
    dtype: str
    key: str
    elements: int
    """Bytes, where the storage has no type."""


_MARK = object()
_PUSHED = frozenset(
    "BININT BININT1 BININT2 LONG1 BINUNICODE SHORT_BINUNICODE BINFLOAT NONE NEWTRUE NEWFALSE EMPTY_TUPLE EMPTY_LIST "
    "EMPTY_DICT".split()
)
_CONSTANTS: dict[str, Callable[[], Any]] = {
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_TUPLE": tuple,
    "EMPTY_LIST": list,
    "EMPTY_DICT": dict,
}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


def _run(stream: io.BytesIO) -> object:
    """Follow one pickle to its end and return what it describes."""
    try:
        return _Machine().follow(pickletools.genops(stream))
    except (ValueError, IndexError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise TensorDamaged(f"its file has a description that breaks off or makes no sense: {error}") from None


class _Machine:
    """Follows the opcodes of a description. It makes plain data, names, storages and tensors, and no other objects."""

    def __init__(self) -> None:
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}

    def follow(self, opcodes: Iterable[tuple[pickletools.OpcodeInfo, Any, int | None]]) -> object:
        stack = self._stack
        for opcode, given, _ in opcodes:
            name = opcode.name
            if name in _PUSHED:
                stack.append(_CONSTANTS[name]() if name in _CONSTANTS else given)
            elif name in ("BINPUT", "LONG_BINPUT"):
                self._memo[given] = stack[-1]
            elif name == "MEMOIZE":
                self._memo[len(self._memo)] = stack[-1]
            elif name in ("BINGET", "LONG_BINGET"):
                stack.append(self._memo[given])
            elif name == "MARK":
                stack.append(_MARK)
            elif name in _TUPLES:
                count = _TUPLES[name]
                stack[-count:] = [tuple(stack[-count:])]
            elif name == "TUPLE":
                stack.append(tuple(self._to_mark()))
            elif name in ("APPEND", "APPENDS"):
                parts = self._to_mark() if name == "APPENDS" else [stack.pop()]
                _demand(stack[-1], list).extend(parts)
            elif name in ("SETITEM", "SETITEMS"):
                flat = self._to_mark() if name == "SETITEMS" else [stack.pop(-2), stack.pop()]
                keys = [_demand(key, str) for key in flat[::2]]
                _demand(stack[-1], dict).update(zip(keys, flat[1::2], strict=True))
            elif name in ("GLOBAL", "STACK_GLOBAL"):
                module, named = given.split(" ", 1) if name == "GLOBAL" else (stack.pop(-2), stack.pop())
                stack.append(_known_name(_Name(_demand(module, str), _demand(named, str))))
            elif name == "BINPERSID":
                stack.append(_storage(*_demand(stack.pop(), tuple)))
            elif name == "REDUCE":
                arguments, function = _demand(stack.pop(), tuple), _demand(stack.pop(), _Name)
                stack.append(_CALLS[function](*arguments) if function in _CALLS else None)
            elif name == "STOP":
                return stack.pop()
            elif name not in ("PROTO", "FRAME"):
                raise TensorDamaged(f"its file has the opcode {name}, which no plain tensor needs. {_CONVERT}")
        raise ValueError("it has no end")

    def _to_mark(self) -> list[Any]:
        parts = []
        while (part := self._stack.pop()) is not _MARK:
            parts.append(part)
        return parts[::-1]


def _known_name(name: _Name) -> _Name:
    """The name, if a plain tensor may mention it."""
    if name.module.split(".")[0] == "torch_npu" and name.name == "Format":
        return name
    is_dtype = name.module == "torch" and name.name in DTYPES
    is_storage = name.module in ("torch", "torch.storage") and name.name in _TYPES
    if name in _CALLS or name in _CLASSES or is_dtype or is_storage:
        return name
    kind = _OTHER_KINDS.get(name.name)
    if kind is not None:
        raise TensorDamaged(f"its file holds something else than a plain tensor: {kind}. {_CONVERT}")
    asked = f"{name.module}.{name.name}"[:_SHOWN]
    raise TensorDamaged(f"its file asks for {asked!r}, which no plain tensor needs; it was not run. {_CONVERT}")


def _storage(mark: object, kind: object, key: object, place: object, count: object, view: object = None) -> _Storage:
    name = _demand(kind, _Name).name
    if mark != "storage" or name not in _TYPES or view is not None or _demand(count, int) < 0:
        raise ValueError("a storage of an unknown kind")
    return _Storage(_TYPES[name], _demand(key, str), _demand(count, int))


def _tensor(
    storage: object,
    offset: object,
    shape: object,
    stride: object,
    grad: object = False,
    hooks: object = None,
    metadata: object = None,
    *,
    dtype: str | None = None,
) -> SavedTensor:
    held = _demand(storage, _Storage)
    sizes, steps = _demand(shape, tuple), _demand(stride, tuple)
    if not all(type(size) is int and 0 <= size < 1 << 63 for size in (offset, *sizes, *steps)):
        raise ValueError("a tensor of an impossible shape")
    if len(sizes) != len(steps) or bool(held.dtype) == (dtype is not None):
        raise ValueError("a tensor that does not fit its storage")
    name = held.dtype or str(dtype)
    nbytes = held.elements * (DTYPES[name].itemsize if held.dtype else 1)
    flags = metadata if isinstance(metadata, dict) else {}
    conjugated, negated = flags.get("conj") is True, flags.get("neg") is True
    return SavedTensor(name, sizes, steps, _demand(offset, int), held.key, nbytes, conjugated, negated)


def _tensor_v3(*arguments: object) -> SavedTensor:
    """As `_tensor`, with the dtype behind the hooks."""
    *plain, dtype = arguments[:7]
    return _tensor(*plain, *arguments[7:8], dtype=_demand(dtype, _Name).name)


def _npu_tensor(*arguments: object) -> SavedTensor:
    """The format behind the hooks is that of the device's memory, not of the file."""
    return _tensor(*arguments[:6])


def _same_tensor(tensor: object, *_: object) -> SavedTensor:
    """A parameter, or a copy for a device: what else is said of it changes no value."""
    made: SavedTensor = _demand(tensor, SavedTensor)
    return made


def _typed_tensor(function: object, kind: object, arguments: object, *_: object) -> SavedTensor:
    """A tensor with attributes of its own."""
    if _demand(kind, _Name) not in _CLASSES:
        raise ValueError("a tensor of an unknown class")
    return _same_tensor(_CALLS[_demand(function, _Name)](*_demand(arguments, tuple)))


_UTILS = "torch._utils"
_CALLS: dict[_Name, Callable[..., object]] = {
    _Name(_UTILS, "_rebuild_tensor"): _tensor,
    _Name(_UTILS, "_rebuild_tensor_v2"): _tensor,
    _Name(_UTILS, "_rebuild_tensor_v3"): _tensor_v3,
    _Name("torch_npu.utils.storage", "_rebuild_npu_tensor"): _npu_tensor,
    _Name(_UTILS, "_rebuild_parameter"): _same_tensor,
    _Name(_UTILS, "_rebuild_parameter_with_state"): _same_tensor,
    _Name(_UTILS, "_rebuild_device_tensor_from_cpu_tensor"): _same_tensor,
    _Name("torch._tensor", "_rebuild_from_type_v2"): _typed_tensor,
    _Name("collections", "OrderedDict"): dict,
}
_CLASSES = {_Name("torch", "Tensor"), _Name("torch._tensor", "Tensor"), _Name("torch.nn.parameter", "Parameter")}


def _demand(value: Any, kind: type[Any]) -> Any:
    if type(value) is not kind:
        raise ValueError(f"{_kind(value)} where {kind.__name__.strip('_').lower()} is needed")
    return value


def _kind(value: object) -> str:
    return "nothing" if value is None else f"a {type(value).__name__.strip('_').lower()}"
