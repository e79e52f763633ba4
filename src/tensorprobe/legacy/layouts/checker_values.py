"""Values of a dump of api_accuracy_checker: `.pt` files of one tensor each, in `forward_real_data` and `backward_real_data`.

In: what an entry has under `datapath`, which is trusted in nothing. Out: the number by which the file is known from then
on, and dtype and shape, which stand in the file alone. The path is that of the machine it was written on, and the dump
may have been moved since: a file is looked for by its name in the folder of values beside the JSON. A path inside the
JSON's own folder is taken as it stands. Nothing else is opened.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path, PurePath

from tensorprobe.errors import TensorDamaged
from tensorprobe.legacy.layouts.folder_files import FolderFiles
from tensorprobe.legacy.layouts.pt_format import describe_saved

FOLDERS = {"forward": "forward_real_data", "backward": "backward_real_data"}
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
            # Not closed here: an error may still hold a part of it. The mapping goes with its last user.
            return describe_saved(memoryview(mmap.mmap(descriptor, size, access=mmap.ACCESS_READ)))
        except (OSError, ValueError) as error:
            raise TensorDamaged(f"its file '{name[:_SHOWN]}' cannot be read: {error}") from None
        finally:
            os.close(descriptor)
