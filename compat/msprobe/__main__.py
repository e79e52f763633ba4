"""`python -m msprobe` is the command `msprobe`."""

from tensorprobe.legacy.msprobe.cli import main

__all__ = ["main"]

if __name__ == "__main__":
    main()
