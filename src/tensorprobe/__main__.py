"""`python -m tensorprobe`: the same program as `tensorprobe`."""

from tensorprobe.cli.main import main

if __name__ == "__main__":
    main()
