"""How a program of ours ends: an error that the user can fix is one message and exit code 2, our own bug is 3."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable

from tensorprobe.errors import TensorprobeError
from tensorprobe.text import message


def guarded(program: Callable[[], object], about: str = "run") -> None:
    """Run a program that ends by itself; `about` is what the user may think is to blame."""
    try:
        program()
    except TensorprobeError as error:
        sys.stderr.write(f"{type(error).__name__}: {message(error)}\n")
        sys.exit(2)
    except BrokenPipeError:
        sys.stderr.close()  # the reader of our output has gone, as `head` does: that is no error
        sys.exit(0)
    except Exception:
        traceback.print_exc()
        sys.stderr.write(f"This is a bug of tensorprobe, not of your {about}. Please report it with the lines above.\n")
        sys.exit(3)
