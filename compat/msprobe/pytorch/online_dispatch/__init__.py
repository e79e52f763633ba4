"""`from msprobe.pytorch.online_dispatch import PtdbgDispatch`: ATen calls compared with the CPU while the program runs."""

from __future__ import annotations

from msprobe.pytorch.online_dispatch.dispatch import PtdbgDispatch

__all__ = ["PtdbgDispatch"]
