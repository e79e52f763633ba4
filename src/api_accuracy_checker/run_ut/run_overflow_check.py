"""`run_overflow_check.py -forward F`: whether an overflow that was met in training is to be expected. Not part of this version."""

from __future__ import annotations

import sys

_SAYS = (
    "run_overflow_check is not part of this version.\n"
    "  run_ut.py -forward … -backward … checks the same calls, and flags a NaN or infinity that the reference does not have.\n"
)


def main() -> int:
    """Say so; exit code 2."""
    sys.stderr.write(_SAYS)
    return 2


if __name__ == "__main__":
    sys.exit(main())
