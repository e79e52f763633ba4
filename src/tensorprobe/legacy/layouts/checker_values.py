"""Values of a dump of api_accuracy_checker: `.pt` files of one tensor each, in `forward_real_data` and `backward_real_data`.

In: what an entry has under `datapath`, which is trusted in nothing. Out: the number by which the file is known from then
on, and dtype and shape, which stand in the file alone. The path is that of the machine it was written on, and the dump
may have been moved since: a file is looked for by its name in the folder of values beside the JSON. A path inside the
JSON's own folder is taken as it stands. Nothing else is opened.
"""

from __future__ import annotations

import io
import mmap
import os
from collections.abc import Sequence
from pathlib import Path, PurePath

from tensorprobe.errors import TensorDamaged
from tensorprobe.legacy.layouts.folder_files import FolderFiles
from tensorprobe.legacy.layouts.pt import refuse_packed
from tensorprobe.legacy.layouts.pt_archive import find_records
from tensorprobe.legacy.layouts.pt_pickle import read_plain_tensor
from tensorprobe.model import DTYPES

FOLDERS = {"forward": "forward_real_data", "backward": "backward_real_data"}
_MAX_PICKLE = 4096
_SHOWN = 200
_LONGEST = 4096


class RealData(FolderFiles):
    """The folders of values beside one JSON file. A file is named by its path from there, with slashes."""

    def __init__(self, root: Path) -> None:
        super().__init__(root, ())
        self.root = root
        self._folders: dict[tuple[str, ...], FolderFiles] = {}
        self._described: dict[str, tuple[str, tuple[int, ...]]] = {}

    def find(self, datapath: str) -> str:
        """The path, from the JSON's folder, of the file that `datapath` means; TensorDamaged when it lies elsewhere."""
        shown = datapath[:_SHOWN]
        path = PurePath(datapath)
        if not path.name or "\0" in datapath or len(datapath) > _LONGEST:
            raise TensorDamaged(f"its datapath {shown!r} names no file")
        if path.parent.name in FOLDERS.values():
            return f"{path.parent.name}/{path.name}"
        inside = path
        if path.is_absolute():
            try:
                inside = path.relative_to(self.root.absolute())
            except ValueError:
                raise TensorDamaged(
                    f"its file '{shown}' is not in {' or '.join(FOLDERS.values())}, nor beside the JSON; it was not opened"
                ) from None
        if ".." in inside.parts:
            raise TensorDamaged(f"its file '{shown}' is outside of the dump; it was not opened")
        return inside.as_posix()

    def open(self, name: str) -> tuple[int, int]:
        """A descriptor of the file at that path, and its size."""
        *folder, file = name.split("/")
        return self._in(tuple(folder)).open(file)

    def describe(self, name: str) -> tuple[str, tuple[int, ...]]:
        """dtype and shape of the tensor in a file."""
        if name not in self._described:
            self._described[name] = self._read_description(name)
        return self._described[name]

    def size_bytes(self) -> int:
        """How many bytes the files of values take."""
        return sum(self._in((folder,)).size_bytes() for folder in FOLDERS.values())

    def close(self) -> None:
        """Give the descriptors of the folders back."""
        for files in self._folders.values():
            files.close()

    def _in(self, folder: tuple[str, ...]) -> FolderFiles:
        if folder not in self._folders:
            self._folders[folder] = FolderFiles(self.root, folder)
        return self._folders[folder]

    def _read_description(self, name: str) -> tuple[str, tuple[int, ...]]:
        descriptor, size = self.open(name)
        try:
            if not size:
                raise TensorDamaged(f"its file '{name[:_SHOWN]}' is empty")
            with mmap.mmap(descriptor, size, access=mmap.ACCESS_READ) as content, memoryview(content) as view:
                dtype, shape = _describe_plain(view) or _describe_loaded(view)
        except (OSError, ValueError) as error:
            raise TensorDamaged(f"its file '{name[:_SHOWN]}' cannot be read: {error}") from None
        finally:
            os.close(descriptor)
        if dtype not in DTYPES:
            raise TensorDamaged(f"its file holds {dtype[:_SHOWN]}, a dtype that no record holds")
        return dtype, tuple(shape)


def _describe_plain(content: memoryview) -> tuple[str, Sequence[int]] | None:
    """From the description that `torch.save` puts before the bytes; None when the file has another form than the usual one."""
    records = find_records(content, lambda name: name == b"data.pkl")
    pickle = records.get(b"data.pkl") if records else None
    if pickle is None or pickle.length > _MAX_PICKLE:
        return None
    tensor = read_plain_tensor(bytes(content[pickle.start : pickle.start + pickle.length]))
    return None if tensor is None else (tensor.dtype, tensor.shape)


def _describe_loaded(content: memoryview) -> tuple[str, Sequence[int]]:
    """Through torch, which runs no code from the file."""
    import torch

    refuse_packed(content)
    try:
        tensor = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True, mmap=False)
    except Exception as error:  # a hostile file can make torch raise nearly anything; all of it means the same to us
        reason = str(error).partition("\n")[0][:_SHOWN]
        raise TensorDamaged(f"torch cannot load its file without running code from it: {reason}") from None
    if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.strided:
        raise TensorDamaged("its file holds something else than a plain tensor")
    return str(tensor.dtype).removeprefix("torch."), tensor.shape
