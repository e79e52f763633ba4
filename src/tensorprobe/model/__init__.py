"""The nouns of the project as frozen structs. Nothing here imports torch, touches a disk or has an opinion."""

from tensorprobe.model.call import ArgumentTree, Call, Direction, Frame, Side, Slot, Stack, Summary
from tensorprobe.model.dtypes import DTYPES, DType
from tensorprobe.model.level import CaptureLevel, Level
from tensorprobe.model.manifest import Coverage, Manifest, RankPart

__all__ = [
    "DTYPES",
    "ArgumentTree",
    "Call",
    "CaptureLevel",
    "Coverage",
    "DType",
    "Direction",
    "Frame",
    "Level",
    "Manifest",
    "RankPart",
    "Side",
    "Slot",
    "Stack",
    "Summary",
]
