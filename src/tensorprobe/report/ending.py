"""How a program of ours ends: an error that the user can fix is one message and exit code 2, our own bug is 3."""

from __future__ import annotations

import codecs
import contextlib
import io
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Any, NoReturn, TextIO

from tensorprobe.errors import TensorprobeError
from tensorprobe.files import demand_uncut, refusal, survive_cuts
from tensorprobe.text import harmless_lines, message


def guarded(program: Callable[[], object], about: str = "run") -> NoReturn:
    """Run a program and exit; `about` is what the user may think is to blame."""
    sys.exit(ended(program, about))


def ended(program: Callable[[], object], about: str = "run") -> int:
    """Run a program that returns its exit code, or raises SystemExit; return the code, after an error is printed."""
    try:
        survive_cuts()
        with contextlib.redirect_stdout(_output(sys.stdout)), contextlib.redirect_stderr(_output(sys.stderr)):
            try:
                code = program()
                return code if isinstance(code, int) else 0
            finally:
                demand_uncut()
                for stream in (sys.stdout, sys.stderr):
                    if stream is not None:
                        stream.flush()  # here, where it can still be an error
    except TensorprobeError as error:
        return _say(2, f"{type(error).__name__}: {message(error)}\n")
    except OSError as error:  # a full or read-only disk, a file that is gone: no bug of ours
        return _say(2, f"{type(error).__name__}: {message(refusal(error))}\n")
    except UnicodeEncodeError as error:
        shown = error.object[max(0, error.start - 60) : error.end + 60]
        needed = "is not UTF-8, which is needed here. Rename the folder, or pass a link to it."
        return _say(2, f"UnicodeEncodeError: {message(f'{shown!r} {needed}')}\n")
    except MemoryError as error:
        text = f"the memory of this machine, or of this process's limit, is used up. {error}"
        return _say(2, f"MemoryError: {message(text.rstrip())}\n")
    except Exception:
        bug = f"This is a bug of tensorprobe, not of your {about}. Please report it with the lines above.\n"
        return _say(3, traceback.format_exc() + bug)


def _output(stream: Any) -> Any:
    """Return a standard stream as `_Output`; what the caller has closed or replaced stays as it is."""
    if type(stream) is not io.TextIOWrapper:
        return stream
    file = io.BufferedWriter(io.FileIO(stream.fileno(), "w", closefd=False))
    # typer goes past a stream that says ascii. What an encoding lacks is no reason to end without an answer.
    encoding = "utf-8" if codecs.lookup(stream.encoding).name == "ascii" else stream.encoding
    return _Output(file, encoding, "backslashreplace", line_buffering=stream.line_buffering)


class _Output(io.TextIOWrapper):
    """A standard stream without control characters, whatever is written to it.

    Its reader may leave early, as `head` does: the rest goes nowhere, and the exit code is the true one.
    """

    def write(self, text: str) -> int:
        with self._whoever_reads():
            super().write(harmless_lines(text))
        return len(text)

    def flush(self) -> None:
        with self._whoever_reads():
            super().flush()

    @contextlib.contextmanager
    def _whoever_reads(self) -> Iterator[None]:
        try:
            yield
        except BrokenPipeError:
            _abandon(self)


def _say(code: int, text: str) -> int:
    """Print an error and return the exit code that belongs to it."""
    _abandon(sys.stdout)
    try:
        sys.stderr.write(harmless_lines(text))
        sys.stderr.flush()
    except (OSError, AttributeError):  # nobody can be told; the exit code still says it
        _abandon(sys.stderr)
    return code


def _abandon(stream: TextIO | None) -> None:
    """Send what is still in the buffer of a stream nowhere: Python would write it at the end, fail again, and exit with 120."""
    with contextlib.suppress(OSError, ValueError, AttributeError):  # it is closed, or no true file
        descriptor = stream.fileno()  # type: ignore[union-attr]
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, descriptor)
        os.close(nowhere)
