"""`python -m msprobe` is the command `msprobe`."""

from msprobe.cli import main

if __name__ == "__main__":
    main()
