"""What `torch.save` writes before the bytes of one plain tensor, recognised without executing any of it.

In: the `data.pkl` of an archive. Out: dtype, shape, strides and the name of the storage, or None when the text is not,
from its first to its last byte, the description of one tensor with nothing about it. That is the text that torch
writes for a tensor on any device, and torch_npu for one on an NPU.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import NamedTuple

from tensorprobe.model import DTYPES

_STORAGES = {
    b"Float": "float32",
    b"Double": "float64",
    b"Half": "float16",
    b"BFloat16": "bfloat16",
    b"Char": "int8",
    b"Byte": "uint8",
    b"Short": "int16",
    b"Int": "int32",
    b"Long": "int64",
    b"Bool": "bool",
    b"ComplexFloat": "complex64",
    b"ComplexDouble": "complex128",
}

_INT = rb"(?:K.|M..|J....)"
_KEEP = rb"q[\x00-\x1f]"
"""Remember what was just made; nothing in the texts that are recognised asks for it again."""
_TUPLE = rb"(?:\)|(?:%(i)b\x85|(?:%(i)b){2}\x86|(?:%(i)b){3}\x87|\((?:%(i)b){4,64}t)%(k)b)" % {b"i": _INT, b"k": _KEEP}
_TEXT = re.compile(
    rb"\x80\x02"
    rb"c(?:torch\._utils\n_rebuild_tensor_v[23]|torch_npu\.utils\.storage\n_rebuild_npu_tensor)\n%(k)b\("
    rb"\(X\x07\0\0\0storage%(k)bctorch(?:\.storage)?\n(?P<storage>\w+)Storage\n%(k)b"
    rb"X(?P<length>.)\0\0\0(?P<key>[0-9]{1,9})%(k)bX.\0\0\0[a-z]+(?::[0-9]+)?%(k)b(?P<count>%(i)b)t%(k)bQ"
    rb"(?P<offset>%(i)b)(?P<shape>%(t)b)(?P<stride>%(t)b)[\x88\x89]ccollections\nOrderedDict\n%(k)b\)R%(k)b"
    rb"(?:ctorch\n(?P<dtype>\w+)\n%(k)b|(?P<npu>[\x88\x89]|%(i)b|ctorch_npu[\w.]*\nFormat\n%(k)b%(i)b\x85%(k)bR%(k)b))?"
    rb"t%(k)bR%(k)b\." % {b"i": _INT, b"k": _KEEP, b"t": _TUPLE},
    re.DOTALL,
)
_ONE_INT = re.compile(_INT, re.DOTALL)


class PlainTensor(NamedTuple):
    """One tensor as its file describes it; `nbytes` is the size of its storage, `key` the name of that."""

    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    key: bytes
    nbytes: int

    @property
    def is_row_major(self) -> bool:
        """Whether the bytes stand in the storage, from its start, in the order of the elements."""
        expected = 1
        for size, step in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if size != 1 and step != expected:
                return False
            expected *= size
        return self.offset == 0


@lru_cache(maxsize=4096)
def read_plain_tensor(text: bytes) -> PlainTensor | None:
    """The tensor that the text describes; None when it is anything but that."""
    match = _TEXT.fullmatch(text)
    if match is None or match["length"][0] != len(match["key"]):
        return None
    storage, named = match["storage"], match["dtype"]
    dtype = named.decode() if named is not None and storage == b"Untyped" else _STORAGES.get(storage)
    if dtype not in DTYPES or (named is not None) != (storage == b"Untyped"):
        return None
    (count,), (offset,) = _integers(match["count"]), _integers(match["offset"])
    shape, stride = _integers(match["shape"]), _integers(match["stride"])
    if len(shape) != len(stride) or min((count, offset, *shape, *stride)) < 0:
        return None
    nbytes = count if storage == b"Untyped" else count * DTYPES[dtype].itemsize
    return PlainTensor(dtype, shape, stride, offset, match["key"], nbytes)


def _integers(text: bytes) -> tuple[int, ...]:
    return tuple(int.from_bytes(found[1:], "little", signed=found[:1] == b"J") for found in _ONE_INT.findall(text))
