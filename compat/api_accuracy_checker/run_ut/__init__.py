"""The commands of the package: `run_ut` and `run_overflow_check`, to be run as scripts from this folder or with `python -m`."""
