"""The dtypes of the format that the installed torch has: those of the oldest supported one are fewer."""

from __future__ import annotations

import torch

from tensorprobe.model import DTYPES

KNOWN_DTYPES = {name: dtype for name, dtype in DTYPES.items() if hasattr(torch, name)}
