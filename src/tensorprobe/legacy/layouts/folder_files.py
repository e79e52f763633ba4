"""The files of one folder of a dump, opened by name thousands of times: the way to the folder is gone only once.

In: names from an index that is trusted in nothing. Out: descriptors of regular files in that very folder, or
TensorDamaged with the bare fact. No link is followed below the dump's own folder, and nothing but a file is opened.
"""

from __future__ import annotations

import os
import stat
import weakref
from pathlib import Path

from tensorprobe.errors import RunError, TensorDamaged
from tensorprobe.record.files import demand_folder, open_file

_RELATIVE = os.open in os.supports_dir_fd and os.stat in os.supports_dir_fd
_FILE_FLAGS = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)
_FOLDER_FLAGS = os.O_RDONLY | getattr(os, "O_DIRECTORY", 0) | getattr(os, "O_CLOEXEC", 0)
_LONGEST_SHOWN = 200


class FolderFiles:
    """The folder `root/parts...`. Its descriptor is held until `close`, and is opened again when it is needed again."""

    def __init__(self, root: Path, parts: tuple[str, ...]) -> None:
        self._root, self._parts = root, parts
        self._closing: weakref.finalize[[int], FolderFiles] | None = None
        self._descriptor = -1

    def open(self, name: str) -> tuple[int, int]:
        """A descriptor of the file of that name, and its size."""
        shown = name[:_LONGEST_SHOWN]
        if not _is_plain(name):
            raise TensorDamaged(f"its name {shown!r} is none that a file in the folder can have")
        try:
            if not _RELATIVE:
                descriptor = open_file(self._root, *self._parts, name)
                return descriptor, os.fstat(descriptor).st_size
            folder = self._folder()
            _demand_file(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode, shown)
            descriptor = os.open(name, _FILE_FLAGS, dir_fd=folder)
        except FileNotFoundError:
            raise TensorDamaged(f"its file '{shown}' is missing") from None
        except TensorDamaged:
            raise
        except (OSError, RunError, ValueError) as error:
            fact = error.strerror if isinstance(error, OSError) else error
            raise TensorDamaged(f"its file '{shown}' cannot be opened: {fact}") from None
        found = os.fstat(descriptor)
        # The name may have been given to something else between the look and the opening.
        if not stat.S_ISREG(found.st_mode):
            os.close(descriptor)
            raise TensorDamaged(f"'{shown}' changed its kind while it was opened")
        return descriptor, found.st_size

    def size_bytes(self) -> int:
        """How many bytes the files of the folder take; 0 when there is no such folder."""
        try:
            with os.scandir(self._folder() if _RELATIVE else self._root.joinpath(*self._parts)) as entries:
                return sum(entry.stat(follow_symlinks=False).st_size for entry in entries if entry.is_file())
        except FileNotFoundError:
            return 0

    def close(self) -> None:
        """Give the descriptor of the folder back."""
        if self._closing is not None:
            self._closing()
        self._closing, self._descriptor = None, -1

    def _folder(self) -> int:
        if self._closing is None:
            demand_folder(self._root, *self._parts)  # says in words what is wrong with it
            descriptor = os.open(self._root, _FOLDER_FLAGS)
            for part in self._parts:
                try:
                    below = os.open(part, _FOLDER_FLAGS | getattr(os, "O_NOFOLLOW", 0), dir_fd=descriptor)
                finally:
                    os.close(descriptor)
                descriptor = below
            self._descriptor = descriptor
            self._closing = weakref.finalize(self, os.close, descriptor)
        return self._descriptor


def _demand_file(mode: int, name: str) -> None:
    if not stat.S_ISREG(mode):
        what = "a symbolic link" if stat.S_ISLNK(mode) else "a folder" if stat.S_ISDIR(mode) else "a special file"
        raise TensorDamaged(f"its file '{name}' is {what}. It was not opened: a dump may not point outside itself")


def _is_plain(name: str) -> bool:
    """Whether it names something in the folder, and nothing above, below or beside it."""
    return name not in ("", ".", "..") and not any(mark in name for mark in "/\\\0")
