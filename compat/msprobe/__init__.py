"""The names of msprobe, for scripts that were written for it. Everything is done by tensorprobe.

    from msprobe.pytorch import PrecisionDebugger, seed_all, compare

docs/migrating.md says what each of them is here, and what tensorprobe can do beyond it.
"""
