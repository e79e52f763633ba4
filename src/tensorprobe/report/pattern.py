"""A pattern of differences in words: one sentence, or nothing."""

from __future__ import annotations

from tensorprobe.model.diff import AxisPart, Pattern

_EFFECTS = {
    "zero": "zero in the candidate",
    "nan": "NaN in the candidate",
    "inf": "infinite in the candidate",
    "sign": "the candidate has the opposite sign",
    "transposed": "the candidate holds the baseline with its last two axes transposed",
}
_EVERYWHERE = "every element: "


def pattern_words(pattern: Pattern | None) -> str:
    """Return `only the last 4 columns (28-31 of axis 3), in all rows, heads and batches: zero in the candidate`."""
    if pattern is None:
        return ""
    effect = _effect(pattern)
    if pattern.elements:
        return _joined(_elements(pattern), effect, pattern)
    limited = [part for part in pattern.axes if part.extent != "all"]
    if pattern.effect in ("shift", "swap", "transposed"):
        return effect
    if not limited:
        return f"{_EVERYWHERE}{effect}"
    inner = [_part(part) for part in reversed(limited)]
    tile = len(limited) == 2 and all(part.extent in ("head", "tail", "range") for part in limited)
    where = f"one tile: {' by '.join(reversed(inner))}" if tile else " of ".join(inner)
    everywhere = [part.name for part in reversed(pattern.axes) if part.extent == "all"]
    rest = f", in all {_listed(everywhere)}" if everywhere else ""
    return _joined(f"only {where}{rest}", effect, pattern)


def _joined(where: str, effect: str, pattern: Pattern) -> str:
    others = f" (other elements differ by at most {pattern.others:.1e})" if pattern.others else ""
    return f"{where}{': ' if effect else ''}{effect}{others}"


def _elements(pattern: Pattern) -> str:
    if len(pattern.elements) == 1:
        return f"only one element, {pattern.elements[0]}"
    return f"only {len(pattern.elements)} elements: {', '.join(map(str, pattern.elements))}"


def _effect(pattern: Pattern) -> str:
    if pattern.effect in _EFFECTS:
        return _EFFECTS[pattern.effect]
    if pattern.effect == "scale":
        return f"the candidate is {pattern.value:.6g} times the baseline"
    if pattern.effect == "bias":
        sign = "plus" if pattern.value > 0 else "minus"
        return f"the candidate is the baseline {sign} {abs(pattern.value):.3g}"
    if pattern.effect == "constant":
        return f"the candidate is {pattern.value:.6g} everywhere"
    if pattern.effect == "rounded":
        return f"the candidate has only {int(pattern.value)} bits of mantissa"
    noun = _singular(pattern.axis_name)
    if pattern.effect == "shift":
        by = pattern.by[0]
        there = f"{noun} i {'-' if by > 0 else '+'} {abs(by)}"
        return f"{pattern.axis_name} (axis {pattern.axis}) are shifted by {by}: the candidate's {noun} i holds the baseline's {there}"
    if pattern.effect == "swap":
        return f"{pattern.axis_name} {pattern.by[0]} and {pattern.by[1]} (axis {pattern.axis}) have changed places"
    return ""


def _part(part: AxisPart) -> str:
    at = f" of axis {part.axis}"
    if part.extent == "one":
        return f"{_singular(part.name)} {part.first}"
    if part.extent in ("head", "tail"):
        which = "first" if part.extent == "head" else "last"
        return f"the {which} {part.count} {part.name} ({part.first}-{part.last}{at})"
    if part.extent == "range":
        return f"{part.name} {part.first}-{part.last}"
    if part.extent == "every":
        return f"every {_ordinal(part.period)} {_singular(part.name)}, from {part.first} on"
    if part.extent == "blocks":
        return f"{part.name} {part.first}-{part.last} of every {part.period}"
    if part.listed:
        return f"{part.name} {_listed([str(each) for each in part.listed])}"
    return f"{part.count} of {part.size} {part.name}"


def _ordinal(number: int) -> str:
    ending = "th" if 10 < number % 100 < 14 else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"


def _singular(name: str) -> str:
    return name.removesuffix("es") if name.endswith("ches") else name.removesuffix("s")


def _listed(names: list[str]) -> str:
    *most, last = names
    return f"{', '.join(most)} and {last}" if most else last
