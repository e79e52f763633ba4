"""When a result is good enough: standards as a table of functions from figures to a verdict.

In: the figures of the device against the reference, those of the CPU in the call's own dtype against the same, and the
dtype of the result. Out: the figure that decided, what it was, what was allowed, and whether that passes. Integers and
bools are exact under every standard.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch

from tensorprobe.judge.families import Family, family_of
from tensorprobe.replay.measuring import Figures

HALF = (torch.float16, torch.bfloat16)


class Evidence(NamedTuple):
    """What a standard judges by. `own` is None where the CPU in its own dtype is what is under test."""

    op: str
    direction: str
    dtype: torch.dtype
    device: Figures
    own: Figures | None
    ideal: Figures
    """The device against the reference rounded to the device's dtype."""
    scale: float
    """The root mean square of the reference."""
    largest: float
    spread: Figures | None = None
    """How far the CPU's result moves when inputs change by a rounding; None until it was asked for."""
    few: bool = False
    """Whether the result has so few different values that their roundings are not independent."""
    beyond: tuple[float, float] | None = None
    """For products in half precision: the greatest error beyond the rounding of the element, of the device and the CPU."""
    strict: bool = False
    """Whether numbers too small for the dtype's full precision count."""
    terms: float = 1.0
    """About how many terms are added up for one element."""
    grain: float = 0.0
    """The rounding of the narrowest input, where the CPU is under test: it may compute in that dtype inside."""


class Opinion(NamedTuple):
    """The figure that came nearest to its limit, or went furthest beyond."""

    judged_by: str
    measured: float
    allowed: float

    @property
    def passes(self) -> bool:
        return self.measured <= self.allowed


class Standard(NamedTuple):
    """A rule and the precision of its reference for half precision: float32 as the older tool has it, or float64."""

    judge: Callable[[Evidence], list[Opinion]]
    reference: str
    says: str
    doubts: bool = False
    """Whether it asks for the spread before it calls a result wrong."""


def judge(standard: Standard, evidence: Evidence) -> Opinion:
    """The opinion of the standard: of all its limits the one that is nearest, or furthest exceeded."""
    return max(limits(standard, evidence), key=lambda opinion: (not opinion.passes, _over(opinion)))


def limits(standard: Standard, evidence: Evidence) -> list[Opinion]:
    """All that the standard looks at, with what it allows."""
    if evidence.dtype.is_floating_point or evidence.dtype.is_complex:
        return standard.judge(evidence)
    allowed = WORSE_COUNT * _noise(evidence, "different") if standard.doubts else 0.0
    return [Opinion("different", evidence.device["different"], allowed)]


def _noise(evidence: Evidence, figure: str) -> float:
    """The greater of the CPU's own error and its spread."""
    found = [figures[figure] for figures in (evidence.own, evidence.spread) if figures is not None]
    return max(found, default=0.0)


def _over(opinion: Opinion) -> float:
    """How many times what is allowed; where the reference is all zero both may be infinite, which says nothing."""
    if not opinion.allowed:
        return float("inf") if opinion.measured > 0 else 0.0
    return opinion.measured / opinion.allowed if math.isfinite(opinion.allowed) else 0.0


def _seed(evidence: Evidence) -> list[Opinion]:
    """Cosine above 0.99; and of the elements all but a thousandth within a thousandth, for float32 ten-thousandths."""
    figures = evidence.device
    share, allowed = ("within_1e3", 0.001) if evidence.dtype in HALF else ("within_1e4", 0.0001)
    return [
        Opinion("one_minus_cosine", figures["one_minus_cosine"], 0.01),
        Opinion(share, 1 - figures[share], allowed),
        Opinion("nonfinite_different", evidence.ideal["nonfinite_different"], 0.0),
    ]


def _binary(evidence: Evidence) -> list[Opinion]:
    return [Opinion("bit_identical", 1.0 - evidence.ideal["bit_identical"], 0.0)]


_ABSOLUTE = {torch.float16: 1e-3, torch.bfloat16: 8e-3, torch.float32: 1e-6, torch.float64: 1e-13}


def _absolute(evidence: Evidence) -> list[Opinion]:
    """The greatest error against the greatest value, which is at least 1."""
    allowed = _ABSOLUTE.get(evidence.dtype, 1e-6) * max(1.0, evidence.largest)
    return [
        Opinion("max_abs", evidence.device["max_abs"], allowed),
        Opinion("nonfinite_different", evidence.ideal["nonfinite_different"], 0.0),
    ]


def _ulp(evidence: Evidence) -> list[Opinion]:
    return [
        Opinion("ulp_max", evidence.ideal["ulp_max"], 2.0 if evidence.dtype in HALF else 32.0),
        Opinion("nonfinite_different", evidence.ideal["nonfinite_different"], 0.0),
    ]


WORSE_NORM, WORSE_MAX, WORSE_TREND, WORSE_COUNT = 3.0, 8.0, 4.0, 3.0
"""How many times worse than the CPU in its own dtype a device may be."""
COMPOSITE = 3.0
"""So many times more for ops that are several in one, such as attention: devices compute them by another way."""
FLOOR_NORM, FLOOR_MAX, FLOOR_TREND, FLOOR_COUNT = 2.0, 4.0, 1 / 32, 5.0
"""What every op is allowed, in units of the dtype's rounding."""
FLOOR_STEPS = 32.0
"""The same where numbers are so small that the distance from one to the next does not depend on their size."""
SHARE_TREND, SURE = 0.5, 8.0
"""How large a trend must be beside the CPU's noise, and how many standard errors make it one."""
ONCE, ONCE_FLOOR, MANY, ONCE_SHARE = 1.4, 0.3, 256, 1 / 16
"""The same for products in half precision that are rounded once, of at least so many elements; and for single elements."""
ALONE_NORM, ALONE_MAX, ALONE_TREND, ALONE_WORSE = 4.0, 32.0, 1.0, 8.0
"""What is allowed where the CPU is under test: in units of rounding, and how many times its spread."""
ALONE_TERMS = 4.0
"""The root of how many terms may be added up one after the other before more is allowed."""


def _noise_aware(evidence: Evidence) -> list[Opinion]:
    """Is the device worse than it must be? Its error against float64, beside that of the CPU in the same dtype."""
    dev, own = evidence.device, evidence.own
    moves = evidence.direction == "forward" and bool(family_of(evidence.op) & Family.EXACT)
    broken = min(evidence.ideal["nonfinite_different"], dev["nonfinite_different"])
    if moves and (own is None or own["different"] == 0):
        different = evidence.ideal["different"] if own is None else dev["different"]
        return [Opinion("different", different + broken, 0.0)]
    nonfinite = Opinion("nonfinite_different", broken, _noise(evidence, "nonfinite_different"))
    eps, tiny = torch.finfo(evidence.dtype).eps, torch.finfo(evidence.dtype).tiny
    tiny *= FLOOR_STEPS * eps if evidence.strict else 1.0
    if own is None:
        eps = max(eps, evidence.grain)
        many = max(1.0, math.sqrt(evidence.terms) / ALONE_TERMS)
        norm = max(ALONE_NORM * eps * many, ALONE_WORSE * _noise(evidence, "relative_l2"), _relative(tiny, evidence))
        most = max(ALONE_MAX * eps * many * evidence.largest, 2 * ALONE_WORSE * _noise(evidence, "max_abs"), tiny)
        return [
            Opinion("relative_l2", dev["relative_l2"], norm),
            Opinion("max_abs", dev["max_abs"], most),
            nonfinite,
            *_trends(evidence, max(_noise(evidence, "relative_l2"), ALONE_TREND * eps), tiny),
        ]
    more = COMPOSITE if family_of(evidence.op) & Family.COMPOSITE else 1.0
    norm = max(more * WORSE_NORM * _noise(evidence, "relative_l2"), FLOOR_NORM * eps, _relative(tiny, evidence))
    if evidence.beyond is not None and dev["count"] >= MANY:
        norm = max(ONCE * own["relative_l2"], ONCE_FLOOR * eps, _relative(tiny, evidence))
    most = max(more * WORSE_MAX * _noise(evidence, "max_abs"), FLOOR_MAX * eps * evidence.largest, tiny)
    rough = "within_1e2" if evidence.dtype in HALF else "within_1e3"
    astray = [
        0.0 if figures is None else (1 - figures[rough]) * figures["count"] for figures in (dev, own, evidence.spread)
    ]
    return [
        Opinion("relative_l2", dev["relative_l2"], norm),
        Opinion("max_abs", dev["max_abs"], most),
        *([] if evidence.strict else [Opinion(rough, astray[0], WORSE_COUNT * max(astray[1:]) + FLOOR_COUNT)]),
        nonfinite,
        *_beyond(evidence, eps * evidence.largest, tiny),
        *_trends(evidence, max(SHARE_TREND * _noise(evidence, "relative_l2"), FLOOR_TREND * eps), tiny),
    ]


def rounds_once(op: str, dtype: torch.dtype) -> bool:
    """Whether a result is a product in half precision: added up in a wider type, and rounded at the end.

    What is added up in half precision is twice as far off already for eight terms, and still below one unit in the last
    place: such results are held to their rounding, as a whole and element by element.
    """
    family = family_of(op)
    return dtype in HALF and bool(family & Family.PRODUCT) and not family & Family.COMPOSITE


def _beyond(evidence: Evidence, rounding: float, tiny: float) -> list[Opinion]:
    if evidence.beyond is None:
        return []
    device, own = evidence.beyond
    return [Opinion("beyond_rounding", device, max(WORSE_MAX * own, ONCE_SHARE * rounding, tiny))]


def _relative(error: float, evidence: Evidence) -> float:
    """An error of each element, relative to the size of the result."""
    return error / evidence.scale if evidence.scale else float("inf") if error else 0.0


def _trends(evidence: Evidence, share: float, tiny: float) -> list[Opinion]:
    """A factor or an offset that goes through the whole result is seen long before single elements are wrong."""
    dev = evidence.device
    found: list[Opinion] = []
    if evidence.few:  # then equal values are all rounded to the same side
        return found
    noises = [each for each in (evidence.own, evidence.spread) if each is not None]
    if abs(dev["slope_z"]) > SURE:
        noise = max((abs(each["slope"] - 1) for each in noises), default=0.0)
        found.append(
            Opinion("slope", abs(dev["slope"] - 1), max(WORSE_TREND * noise, share, _relative(tiny, evidence)))
        )
    if abs(dev["bias_z"]) > SURE:
        noise = max((abs(each["bias"]) for each in noises), default=0.0)
        found.append(Opinion("bias", abs(dev["bias"]), max(WORSE_TREND * noise, share * evidence.scale, tiny)))
    return found


STANDARDS: dict[str, Standard] = {
    "noise-aware": Standard(_noise_aware, "double", "not worse than the CPU in the same dtype must be", doubts=True),
    "seed": Standard(
        _seed, "single", "cosine above 0.99, and the share of elements within a thousandth of the older tool"
    ),
    "binary": Standard(_binary, "double", "equal to the rounded reference bit for bit"),
    "absolute": Standard(_absolute, "double", "the greatest error below a limit of the dtype"),
    "ulp": Standard(_ulp, "double", "a few units in the last place of the rounded reference"),
}
