"""The names of ptdbg_ascend, for scripts that were written for it. Everything is done by tensorprobe."""
