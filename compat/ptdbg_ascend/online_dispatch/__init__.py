"""`from ptdbg_ascend.online_dispatch import PtdbgDispatch`: ATen calls compared with the CPU while the program runs."""

from tensorprobe.legacy.msprobe.online import PtdbgDispatch

__all__ = ["PtdbgDispatch"]
