"""Standards judge the result of one op against a reference in a wider dtype.

In: the figures of the device against the reference, those of the CPU in the call's own dtype against the same reference, and
the dtype of the result. Out: the figure that decided, its value, what was allowed, and whether that passes. Integers and bool
are exact under every standard.

The default standard, `noise-aware` for users, is `_no_worse_than_cpu` here: it *measures* the noise of an op by running it on the
CPU in the same dtype. The policy of the same name, for two runs, has no such measurement and *predicts* the noise
(`judge.noise_model`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

from tensorprobe.model.dtypes import DTYPES, EPS, HALF, TINY
from tensorprobe.model.measured import Opinion
from tensorprobe.ops import Trait, has, traits_of

Figures = Mapping[str, float]


class Evidence(NamedTuple):
    """The figures that a standard judges. `own` is None if the CPU itself is under test."""

    op: str
    direction: str
    dtype: str
    device: Figures
    own: Figures | None
    ideal: Figures
    """The device against the reference, rounded to the device's dtype."""
    scale: float
    """The root mean square of the reference."""
    largest: float
    spread: Figures | None = None
    """How far the CPU's result moves when inputs change by one rounding; None until measured."""
    few: bool = False
    """Whether the result has so few distinct values that their roundings are not independent."""
    beyond: tuple[float, float] | None = None
    """In half precision: the largest error beyond the rounding of the element, on the device and the CPU."""
    strict: bool = False
    """Whether subnormal numbers count."""
    terms: float = 1.0
    """About how many terms are summed for one element."""
    grain: float = 0.0
    """The eps of the narrowest input, where the CPU is under test: it may compute in that dtype internally."""


class Standard(NamedTuple):
    """A rule and the precision of its reference for half precision: float32 as in the older tool, or float64."""

    judge: Callable[[Evidence], list[Opinion]]
    reference: str
    says: str
    doubts: bool = False
    """Whether it needs the spread before it fails a result."""


def judge(standard: Standard, evidence: Evidence) -> Opinion:
    """Return the deciding opinion: the limit that is exceeded most, or the nearest one."""
    return max(limits(standard, evidence), key=lambda opinion: (not opinion.passes, _over(opinion)))


def limits(standard: Standard, evidence: Evidence) -> list[Opinion]:
    """Return an opinion for each figure that the standard looks at."""
    if DTYPES[evidence.dtype].kind in ("float", "complex"):
        return standard.judge(evidence)
    allowed = WORSE_COUNT * _noise(evidence, "different") if standard.doubts else 0.0
    return [Opinion("different", evidence.device["different"], allowed)]


def _noise(evidence: Evidence, figure: str) -> float:
    """Return the larger of the CPU's own error and its spread."""
    found = [figures[figure] for figures in (evidence.own, evidence.spread) if figures is not None]
    return max(found, default=0.0)


def _over(opinion: Opinion) -> float:
    """Return the error over its limit; 0 if the limit is infinite, as for a reference of zeros."""
    if not opinion.allowed:
        return float("inf") if opinion.measured > 0 else 0.0
    return opinion.measured / opinion.allowed if math.isfinite(opinion.allowed) else 0.0


def _seed(evidence: Evidence) -> list[Opinion]:
    """Cosine above 0.99, and all but 0.1 % of the elements within a relative error of 0.001 (float32: 0.01 %, 0.0001).

    As in the tables of the older tool, the share does not count when the greatest absolute error is below 0.001. A result
    that still fails passes if the CPU in the same dtype is no better: bfloat16 itself has no three digits. Single
    elements are not looked at then, since a device may round after each step of an op, where the CPU rounds once.
    """
    figures = evidence.device
    share, allowed = ("1e3", 0.001) if evidence.dtype in HALF else ("1e4", 0.0001)
    beyond = 1 - figures[f"within_{share}"]
    is_small = figures["max_abs"] < _SMALL
    opinions = [
        Opinion("one_minus_cosine", figures["one_minus_cosine"], 0.01),
        Opinion("max_abs", figures["max_abs"], _SMALL) if is_small else Opinion(f"share_over_{share}", beyond, allowed),
        Opinion("nonfinite_different", evidence.ideal["nonfinite_different"], 0.0),
    ]
    if not all(opinion.passes for opinion in opinions):
        explained = _no_worse_than_cpu(evidence._replace(beyond=None))
        as_a_whole = [opinion for opinion in explained if not opinion.judged_by.startswith("over_")]
        if all(opinion.passes for opinion in as_a_whole):
            return as_a_whole
    return opinions


_SMALL = 0.001


def _binary(evidence: Evidence) -> list[Opinion]:
    return [Opinion("bit_identical", 1.0 - evidence.ideal["bit_identical"], 0.0)]


_ABSOLUTE = {"float16": 1e-3, "bfloat16": 8e-3, "float32": 1e-6, "float64": 1e-13}


def _absolute(evidence: Evidence) -> list[Opinion]:
    """The largest error, relative to the largest value if that is above 1."""
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
"""An extra factor for composite ops such as attention, which devices compute differently."""
FLOOR_NORM, FLOOR_MAX, FLOOR_TREND, FLOOR_COUNT = 2.0, 4.0, 1 / 32, 5.0
"""The allowance of every op, in units of the dtype's eps (the last: elements)."""
FLOOR_STEPS = 32.0
"""The same for subnormal numbers, whose spacing is constant."""
CONSTANT_TREND = 0.5
"""The same at first sight, in float32 and wider: a number of the program, such as a rate, is rounded for all elements alike."""
SHARE_TREND, SURE = 0.5, 8.0
"""How large a trend must be relative to the CPU's noise, and how many standard errors make it significant."""
ONCE, ONCE_FLOOR, MANY, ONCE_SHARE = 1.4, 0.3, 256, 1 / 16
"""Products in half precision that are rounded once: how many times worse, the floor in eps, from how many elements on; and
the floor of a single element."""
OTHER_SHARE = 0.5
"""The floor of a single element where the CPU rounds in between too, in eps of the largest."""
ALONE_NORM, ALONE_MAX, ALONE_TREND, ALONE_WORSE = 4.0, 32.0, 1.0, 8.0
"""The allowance if the CPU is under test: in units of eps, and as a multiple of its spread."""
ALONE_TERMS = 4.0
"""The square root of the number of terms that may be summed sequentially before more is allowed."""


def _no_worse_than_cpu(evidence: Evidence) -> list[Opinion]:
    """Compare the device's error against float64 with that of the CPU in the same dtype."""
    dev, own = evidence.device, evidence.own
    moves = evidence.direction == "forward" and has(evidence.op, Trait.MOVES)
    broken = min(evidence.ideal["nonfinite_different"], dev["nonfinite_different"])
    if moves and (own is None or own["different"] == 0):
        different = evidence.ideal["different"] if own is None else dev["different"]
        return [Opinion("different", different + broken, 0.0)]
    nonfinite = Opinion("nonfinite_different", broken, _noise(evidence, "nonfinite_different"))
    eps, tiny = EPS[evidence.dtype], TINY[evidence.dtype]
    tiny *= FLOOR_STEPS * eps if evidence.strict else 1.0
    if own is None:
        if evidence.dtype in HALF:  # computed in float32, where the CPU may flush: oneDNN's bfloat16 gelu does
            tiny = max(tiny, TINY["float32"])
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
    more = COMPOSITE if has(evidence.op, Trait.COMPOSITE) else 1.0
    norm = max(more * WORSE_NORM * _noise(evidence, "relative_l2"), FLOOR_NORM * eps, _relative(tiny, evidence))
    if rounds_once(evidence.op, evidence.dtype) and dev["count"] >= MANY:
        norm = max(ONCE * own["relative_l2"], ONCE_FLOOR * eps, _relative(tiny, evidence))
    most = max(more * WORSE_MAX * _noise(evidence, "max_abs"), FLOOR_MAX * eps * evidence.largest, tiny)
    rough = "1e2" if evidence.dtype in HALF else "1e3"
    astray = [
        0.0 if figures is None else (1 - figures[f"within_{rough}"]) * figures["count"]
        for figures in (dev, own, evidence.spread)
    ]
    return [
        Opinion("relative_l2", dev["relative_l2"], norm),
        Opinion("max_abs", dev["max_abs"], most),
        *(
            []
            if evidence.strict
            else [Opinion(f"over_{rough}", astray[0], WORSE_COUNT * max(astray[1:]) + FLOOR_COUNT)]
        ),
        nonfinite,
        *_beyond(evidence, eps * evidence.largest, tiny),
        *_trends(evidence, max(SHARE_TREND * _noise(evidence, "relative_l2"), FLOOR_TREND * eps), tiny),
    ]


def rounds_once(op: str, dtype: str) -> bool:
    """Return whether a result is a half-precision product: summed in a wider dtype and rounded at the end.

    A sum in half precision is twice as far off after only eight terms, and still below one unit in the last place. So
    such results are held to one rounding, as a whole and element by element.
    """
    traits = traits_of(op)
    return dtype in HALF and bool(traits & Trait.MULTIPLIES) and not traits & Trait.COMPOSITE


def holds_elements(op: str, dtype: str) -> bool:
    """Return whether each element of a result is held to the rounding of its own size, not only to that of the largest.

    Half precision is computed in a wider dtype and rounded at the end. Composite ops round in between.
    """
    return dtype in HALF and not has(op, Trait.COMPOSITE)


def _beyond(evidence: Evidence, rounding: float, tiny: float) -> list[Opinion]:
    if evidence.beyond is None:
        return []
    device, own = evidence.beyond
    once = rounds_once(evidence.op, evidence.dtype) or WORSE_MAX * own <= ONCE_SHARE * rounding  # so the CPU does
    share = ONCE_SHARE if once else OTHER_SHARE
    return [Opinion("beyond_rounding", device, max(WORSE_MAX * own, share * rounding, tiny))]


def _relative(error: float, evidence: Evidence) -> float:
    """Judge the error of the elements, relative to the size of the result."""
    return error / evidence.scale if evidence.scale else float("inf") if error else 0.0


def _trends(evidence: Evidence, share: float, tiny: float) -> list[Opinion]:
    """Judge a common factor or offset, which shows long before single elements are wrong."""
    dev = evidence.device
    found: list[Opinion] = []
    if evidence.few:  # equal values are all rounded in the same direction
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
    "noise-aware": Standard(
        _no_worse_than_cpu, "double", "not worse than the CPU in the same dtype must be", doubts=True
    ),
    "seed": Standard(
        _seed,
        "single",
        "cosine above 0.99, and the share of elements within a thousandth of the older tool",
        doubts=True,
    ),
    "binary": Standard(_binary, "double", "equal to the rounded reference bit for bit"),
    "absolute": Standard(_absolute, "double", "the greatest error below a limit of the dtype"),
    "ulp": Standard(_ulp, "double", "a few units in the last place of the rounded reference"),
}


class Sight(NamedTuple):
    """Sums over all values of a pair, all of them finite: a of the reference, d of the result minus it."""

    squares_a: float
    squares_d: float
    a_times_d: float
    sum_d: float
    max_d: float
    max_a: float
    different: float
    astray_1e3: float
    astray_1e2: float

    @property
    def relative_error(self) -> float:
        """The norm of the difference over the norm of the reference."""
        return math.sqrt(self.squares_d / self.squares_a) if self.squares_a else math.inf if self.squares_d else 0.0


def is_right(
    op: str,
    dtype: str,
    seen: Sight,
    count: int,
    *,
    terms: Callable[[], float] | None,
    beyond: Callable[[], float],
) -> bool:
    """Return whether a result passes the `noise-aware` standard even if the CPU made no error. This needs only one pass.

    False means "measure more", not "wrong". `terms` is given where the CPU itself is under test: about how many terms are
    summed for an element. `beyond` gives the greatest error beyond the rounding of an element.
    """
    if not seen.different:
        return True
    eps = EPS.get(dtype)
    if eps is None or not seen.squares_a or traits_of(op) & Trait.MOVES:
        return False
    norm = norm_at_sight(op, dtype, count, terms)
    trend = ALONE_TREND if terms is not None else FLOOR_TREND if dtype in HALF else CONSTANT_TREND
    if seen.relative_error > norm or seen.max_d > (FLOOR_MAX if terms is None else ALONE_MAX) * eps * seen.max_a:
        return False
    if terms is None and _goes_astray(op, dtype, seen, count):
        return False
    if _leans(seen, trend * eps, count):
        return False
    limit = ONCE_SHARE * eps * seen.max_a
    return terms is not None or not holds_elements(op, dtype) or seen.max_d <= limit or beyond() <= limit


def norm_at_sight(op: str, dtype: str, count: int, terms: Callable[[], float] | None = None) -> float:
    """Return the relative error up to which `is_right` lets a result pass."""
    if terms is not None:
        return ALONE_NORM * max(1.0, math.sqrt(terms()) / ALONE_TERMS) * EPS[dtype]
    return (ONCE_FLOOR if rounds_once(op, dtype) and count >= MANY else FLOOR_NORM) * EPS[dtype]


def _goes_astray(op: str, dtype: str, seen: Sight, count: int) -> bool:
    """Return whether more elements are far off than happens by chance: sums may be as small as their rounding errors."""
    astray, share = (seen.astray_1e2, 100) if dtype in HALF else (seen.astray_1e3, 1000)
    sums = traits_of(op) & (Trait.MULTIPLIES | Trait.ROUNDED_ONCE) == Trait.MULTIPLIES
    small = share * seen.relative_error * count if sums else 0.0
    return astray > FLOOR_COUNT + small


def _leans(seen: Sight, trend: float, count: int) -> bool:
    """Return whether the difference has a scale or offset that exceeds `trend` significantly."""
    squares_a, squares_d = seen.squares_a, seen.squares_d
    if abs(seen.a_times_d) > trend * squares_a and _is_sure(seen.a_times_d / math.sqrt(squares_a), squares_d, count):
        return True
    if abs(seen.sum_d) <= trend * math.sqrt(squares_a / count) * count:
        return False
    return _is_sure(seen.sum_d / math.sqrt(count), squares_d, count)


def _is_sure(part: float, squares_d: float, count: int) -> bool:
    """Return whether a trend is statistically significant."""
    rest = squares_d - part * part
    return count >= 2 and (rest <= 0 or part * part > SURE**2 * rest / max(count - 1, 1))
