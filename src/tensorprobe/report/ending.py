"""How a program of ours ends: an error that the user can fix is one message and exit code 2, our own bug is 3."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable

from tensorprobe.errors import TensorprobeError
from tensorprobe.files import refusal
from tensorprobe.text import message


def guarded(program: Callable[[], object], about: str = "run") -> None:
    """Run a program that ends by itself; `about` is what the user may think is to blame."""
    try:
        program()
    except TensorprobeError as error:
        _end(type(error).__name__, str(error))
    except BrokenPipeError:
        sys.stderr.close()  # the reader of our output has gone, as `head` does: that is no error
        sys.exit(0)
    except OSError as error:  # a full or read-only disk, a file that is gone: no bug of ours
        _end(type(error).__name__, refusal(error))
    except UnicodeEncodeError as error:
        shown = error.object[max(0, error.start - 60) : error.end + 60]
        _end(
            "UnicodeEncodeError",
            f"{shown!r} is not UTF-8, which is needed here. Rename the folder, or pass a link to it.",
        )
    except MemoryError as error:
        _end("MemoryError", f"the memory of this machine, or of this process's limit, is used up. {error}".rstrip())
    except Exception:
        traceback.print_exc()
        sys.stderr.write(f"This is a bug of tensorprobe, not of your {about}. Please report it with the lines above.\n")
        sys.exit(3)


def _end(kind: str, text: str) -> None:
    sys.stderr.write(f"{kind}: {message(text)}\n")
    sys.exit(2)
