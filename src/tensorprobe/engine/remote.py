"""Remote folders: URLs that fsspec can open. Only this file imports fsspec, and only for a URL.

Lists the files below a URL and copies files in both directions. Exceptions of fsspec and the
packages behind it become our errors, which name the URL.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from tensorprobe.errors import RunError, SettingsError

_LOCAL = ("file", "local")


def is_url(place: str) -> bool:
    """Return whether this is a URL and not a path."""
    return "://" in place


def local_path(place: str | os.PathLike[str]) -> Path | None:
    """Return the local path, also of a `file://` URL; None for another URL."""
    text = os.fspath(place)
    if not is_url(text):
        return Path(text)
    parts = urlsplit(text)
    if parts.scheme not in _LOCAL:
        return None
    if parts.netloc not in ("", "localhost"):
        raise SettingsError(f"{text!r} names the machine {parts.netloc!r}; a file URL has three slashes: file:///path.")
    return Path(unquote(parts.path))


def is_in_memory(place: str) -> bool:
    """Return whether the URL is in the memory of this process, invisible to others."""
    return is_url(place) and place.partition("://")[0].split("::")[-1] == "memory"


class RemoteFolder:
    """A remote folder. Names are relative to it, separated by `/`."""

    def __init__(self, url: str) -> None:
        self.url = url
        try:
            from fsspec.core import url_to_fs

            self._files, root = url_to_fs(url)
        except ImportError as error:  # fsspec or the package of the protocol; the message names it
            raise SettingsError(f"{url!r} cannot be opened: {error}") from error
        except ValueError as error:
            raise SettingsError(
                f"{url!r} cannot be opened: {error}. Pass a path, or a URL that fsspec knows."
            ) from error
        except Exception as error:
            raise RunError(f"{url!r} cannot be opened: {_fact(error)}") from error
        self._root = str(root).rstrip("/")

    def names(self) -> list[str]:
        """Return every file below the folder, sorted; empty if the folder does not exist."""
        with self._said("read"):
            self._files.invalidate_cache()
            found = self._files.find(self._root)
        start = self._root + "/"
        return sorted(path[len(start) :] for path in map(str, found) if path.startswith(start))

    def get(self, wanted: Mapping[str, Path]) -> None:
        """Download files: name → local path."""
        if not wanted:
            return
        for path in wanted.values():
            path.parent.mkdir(parents=True, exist_ok=True)
        with self._said("read"):
            self._files.get(self._paths(wanted), [str(path) for path in wanted.values()])

    def put(self, given: Mapping[str, Path]) -> None:
        """Upload files in order: name → local path."""
        with self._said("written"):
            self._files.makedirs(self._root, exist_ok=True)
            for name, path in given.items():
                self._files.put_file(str(path), f"{self._root}/{name}")

    def remove(self, names: Iterable[str]) -> None:
        """Remove files."""
        with self._said("written"):
            for path in self._paths(names):
                self._files.rm_file(path)

    def _paths(self, names: Iterable[str]) -> list[str]:
        return [f"{self._root}/{name}" for name in names]

    @contextmanager
    def _said(self, action: str) -> Iterator[None]:
        """Turn the exceptions of any storage into a RunError."""
        try:
            yield
        except Exception as error:
            raise RunError(f"{self.url!r} cannot be {action}: {_fact(error)}") from error


def _fact(error: Any) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
