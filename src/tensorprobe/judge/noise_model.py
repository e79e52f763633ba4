"""Predicts how much two correct computations may differ, from dtype, length of sums, size of terms and error of inputs.

Each output row gets two allowances, each as an RMS error and as a maximum error: `noise`, which rounding alone
explains, and `explained`, which adds the propagated errors of the inputs. Both are relative to the *natural size* of
a result: its size if its terms did not cancel. So a result that is zero in exact arithmetic is not
blamed. Everything is vectorised over the rows of one step of one rank.

With u the unit roundoff of the result, v that of the accumulator, K the length of the sums:
    noise     = c u |result| + C v sqrt(K) size
    explained = noise + gain (error of the inputs) size
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy

from tensorprobe.judge.inside import Inside
from tensorprobe.model.call import op_of
from tensorprobe.model.dtypes import BY_CODE, EPS
from tensorprobe.model.measured import DIGEST, NONE, STATISTICS, VALUES, Measured
from tensorprobe.ops import Trait, has_parts, traits_of

Array = numpy.ndarray[Any, Any]

_ROUNDOFF = numpy.array([EPS.get(dtype.name, 0.0) / 2 for dtype in BY_CODE] + [0.0])
"""By dtype code. Integers and bool are exact and have 0. The last entry is for an unknown dtype."""
_ACCUMULATOR = 2.0**-24
"""Narrow floats are expected to accumulate in float32."""
_ROUNDOFF_OF_FLOAT64 = 2.0**-53

RESULT_ROUNDINGS = 0.5
"""RMS error in roundoffs of a narrow result. Two results that agree to float32 before they are rounded differ in few elements,
by one unit each; half a roundoff lets an eighth of them differ."""
COMPOSITE_FACTOR = 4.0
WIDE_FACTOR = 8.0
"""For float32 and wider: elementary functions differ by a few units between libraries."""
LEAST_PEAK = 2.0
"""A single element may differ by this many roundoffs: one unit in the last place."""
SUM_FACTOR = 4.0
MEASURED_FACTOR = 4.0
"""How many times the difference between right runs of the baseline is allowed: they are few, and differ by chance."""
NARROW_FACTOR = 2.0
"""Roundoffs by which a result in a narrower dtype is off: its operands are rounded to it, and so is the result."""
GAIN = 16.0
JUMP_FACTOR = 16.0
"""Times the square root of the error: the share of a result that may jump, if gradients vary in size."""
SCALED_SHARE = 0.95
"""An error of which a factor explains this share is that factor."""
PEAK = 8.0
"""The maximum error may be this many times the RMS allowance, because values vary in size within a tensor."""
GREATEST_OFFSET = 1e3
"""How far values of a normalised tensor may be from their mean, in standard deviations. Beyond, nothing is excused."""
STATISTICS_ROUNDINGS = 16.0
"""Roundoffs by which a mean or norm of the same numbers may differ, as RMS of the numbers: each device adds in its own order."""
SKETCH_SPREAD = 2.3
"""A distance that is estimated from eight numbers is at most this far above the true one, but for one in a million."""
CHANCE = 64.0
"""How many times better than its elements all statistics of a tensor may agree by chance."""
QUOTIENTS_OFF = 1e-2
"""How much the norm of a parameter may move apart in one update where values were not recorded."""
GREATEST_RANGE = 100.0
"""Arguments of an exponential further apart give zero, so a mask of -1e9 does not excuse other errors."""
_TINY = 1e-300
_MASK = 1e8
"""Statistics with a maximum or minimum beyond this are those of a mask."""


@dataclass
class Errors:
    """The measured absolute errors and sizes of each row."""

    exact: Array
    """Rows of integers and bool."""
    measured: Array
    equal: Array
    rms_error: Array
    peak_error: Array
    rms: Array
    peak: Array
    roundoff: Array
    count: Array
    relative: Array
    """RMS error over RMS of the baseline."""
    noise: tuple[Array, Array]
    """RMS and maximum difference between right runs of the baseline: MEASURED_FACTOR times that is allowed."""
    mixed: Array
    """Rows of which one side has a narrower floating-point dtype than the other."""


@dataclass
class Allowance:
    """The allowance of each row; meaningful for outputs."""

    noise: tuple[Array, Array]
    """RMS and maximum error that rounding explains."""
    explained: tuple[Array, Array]
    """Plus smoothly propagated errors of the inputs."""
    amplified: tuple[Array, Array]
    """Plus errors amplified by jumps and divisions by small numbers."""
    size: Array
    input_error: Array
    """For each call: the largest relative error among its inputs."""
    operands_equal: Array
    """For each call."""
    exact: Array
    """For each row: equal inputs must give equal bits."""
    rounded_once: Array
    """For each row: equal inputs must give results within a few units, element by element."""


def errors_of(measured: Measured) -> Errors:
    """Return the errors and sizes of all rows."""
    rows, figures = measured.rows, measured.rows.figures
    counts = numpy.maximum(figures["count"], 0).astype(float)
    sizes = numpy.array([_elements(shape) for shape in rows.shapes[0]], dtype=float)
    finite = numpy.where(counts > 0, counts, numpy.maximum(sizes, 1))
    roundoff = numpy.maximum(_ROUNDOFF[rows.dtypes[0]], _ROUNDOFF[rows.dtypes[1]])
    with numpy.errstate(all="ignore"):
        rms = _clean(figures["baseline_norm"]) / numpy.sqrt(finite)
        other = _clean(figures["candidate_norm"]) / numpy.sqrt(finite)
        peak = numpy.maximum(_finite_size(figures["baseline_max"]), _finite_size(figures["baseline_min"]))
        relative = figures["relative_l2"]
        rms_error = numpy.where(numpy.isinf(relative), other, _clean(relative) * rms)
        peak_error = _clean(figures["max_abs"])
        weak = rows.basis == STATISTICS
        same = numpy.zeros(len(weak), dtype=bool)
        if weak.any():
            ends = [_difference(figures[f"candidate_{end}"], figures[f"baseline_{end}"]) for end in ("max", "min")]
            peak_error[weak] = numpy.maximum(*ends)[weak]
            # A dump without norms: the size comes from an upper bound, the error from the mean alone.
            unknown = weak & (numpy.isnan(figures["baseline_norm"]) | numpy.isnan(figures["candidate_norm"]))
            rms[unknown] = _greatest_rms(figures)[unknown]
            other[unknown] = rms[unknown]
            sketched = _clean(relative) * rms / SKETCH_SPREAD
            known = numpy.maximum(abs(other - rms), abs(_clean(figures["bias"])))
            rms_error[weak] = numpy.maximum(known, sketched)[weak]
            # A mask hides the statistics of all other elements. Such a row counts as other, by nothing that is known.
            masked = weak & (peak >= _MASK) & (peak_error == 0)
            rms_error[masked], rms[masked], peak[masked] = 0.0, 1.0, 1.0
            same = weak & ~rows.other_bits & ~masked & _same_statistics(figures, rms, finite)
            rms_error[same] = 0.0
        # A gradient that is zero in exact arithmetic may be exactly zero on one side: its size is that of the other.
        rms, peak = numpy.where(rms > 0, rms, rms_error), numpy.where(rms > 0, peak, peak_error)
        relative = numpy.where(rms_error > 0, rms_error / numpy.maximum(rms, _TINY), 0.0)
    alike = (rms_error == 0) & (peak_error == 0) & (figures["nonfinite_different"] <= 0) & (figures["different"] <= 0)
    equal = (rows.basis == DIGEST) | ((rows.basis == VALUES) & alike) | same
    return Errors(
        exact=roundoff == 0,
        measured=rows.basis != NONE,
        equal=equal,
        rms_error=rms_error,
        peak_error=peak_error,
        rms=rms,
        peak=numpy.maximum(peak, rms),
        roundoff=roundoff,
        count=finite,
        relative=numpy.minimum(relative, 1e6),
        noise=measured.noise or (numpy.zeros(len(rms)), numpy.zeros(len(rms))),
        mixed=numpy.logical_and(*(_ROUNDOFF[each] > 0 for each in rows.dtypes))
        & (_ROUNDOFF[rows.dtypes[0]] != _ROUNDOFF[rows.dtypes[1]]),
    )


def allow(measured: Measured, errors: Errors, inside: Inside) -> Allowance:
    """Return how much each row may differ if it is an output of its call. `inside` says what a module may take its errors from."""
    calls, rows = measured.calls, measured.rows
    call, (group, groups) = rows.call, _groups(measured)
    traits = numpy.array([traits_of(op) for op in calls.op], dtype=numpy.int64)
    for at in measured.region_positions:
        traits[at] = _traits_of_region(measured.region_calls(at))
    # An ATen call in backward is an ordinary op: all it uses is among its inputs.
    backward = numpy.array(
        [way == "backward" and level.links_backward for way, level in zip(calls.direction, calls.level, strict=True)],
        dtype=bool,
    )
    forward = numpy.array(calls.forward, dtype=numpy.int64)
    operands = _Operands(measured, errors, group, groups)
    linked = forward >= 0
    operands.join_forward(forward, linked)

    of_call, is_backward, has_forward = traits[call], backward[call], linked[call]

    def has(trait: Trait) -> Array:
        return numpy.asarray((of_call & trait) != 0)

    product = has(Trait.MULTIPLIES)
    length = _sum_lengths(measured, errors, operands, group, product, has(Trait.REDUCES), is_backward)
    first, second = operands.top(group, is_backward & has_forward)
    size = numpy.where(product | is_backward, first[0] * second[0], 0.0)
    # Take the size of an exponential from its result: its input may hold a mask of any size.
    by_input = (has(Trait.CANCELS | Trait.REDUCES) & ~has(Trait.EXPONENTIAL)) | is_backward
    size = numpy.where(product & ~has(Trait.EXPONENTIAL), size, numpy.where(by_input, first[0], 0.0))
    terms = numpy.where(has(Trait.AVERAGES) & ~is_backward, 1.0, numpy.sqrt(length))
    kernels = numpy.array(["_backward" in op and op.startswith("Aten.") for op in calls.op], dtype=bool)
    if kernels.any():  # a kernel for gradients multiplies the first argument by the others, and its terms may cancel
        size = numpy.maximum(size, numpy.where(kernels[call], operands.size_of_gradients(measured, errors)[call], 0.0))
    product_peak = terms * PEAK * size + first[1] * second[1]
    peak = numpy.where(product, product_peak, numpy.where(by_input, terms * first[1], 0.0))
    jacobian = numpy.where(is_backward & has_forward, operands.steepness[numpy.maximum(forward[call], 0)], 1.0)
    size = numpy.maximum(terms * size * numpy.where(product, 1.0, jacobian), errors.rms)
    peak = numpy.maximum(numpy.maximum(peak * numpy.where(product, 1.0, jacobian), errors.peak), size)

    exact = has(Trait.MOVES) & ~is_backward & ~errors.mixed
    roundings = RESULT_ROUNDINGS * numpy.where(has(Trait.COMPOSITE), COMPOSITE_FACTOR, 1.0)
    roundings = numpy.where(exact, 0.0, roundings * numpy.where(errors.roundoff <= _ACCUMULATOR, WIDE_FACTOR, 1.0))
    peak_roundings = numpy.where(exact, 0.0, numpy.maximum(2 * roundings, LEAST_PEAK))
    accumulator = numpy.where(exact, 0.0, numpy.minimum(errors.roundoff, _ACCUMULATOR))
    # Norms of narrow inputs sum the gradients of their weights in that dtype, in one part per thread; so do embeddings.
    narrow_sums = is_backward & has(Trait.DIVIDES) & has(Trait.REDUCES)
    narrow_sums |= numpy.array(["embedding_dense_backward" in op for op in calls.op], dtype=bool)[call]
    accumulator = numpy.where(
        narrow_sums, numpy.maximum(accumulator, operands.roundoff[group] / SUM_FACTOR), accumulator
    )
    steep = 1 + numpy.where(has(Trait.EXPONENTIAL), operands.range[group], 0.0)
    steep = steep + numpy.where(has(Trait.DIVIDES) & has(Trait.REDUCES), operands.offset[group], 0.0)
    sums = SUM_FACTOR * accumulator * numpy.sqrt(length) * steep
    narrower = numpy.maximum(operands.narrower, inside.greatest(operands.narrower))
    lost = NARROW_FACTOR * steep * numpy.maximum(narrower, numpy.where(linked, narrower[forward], 0.0))[call]
    noise = (
        roundings * errors.roundoff * errors.rms + (sums + lost) * size + MEASURED_FACTOR * errors.noise[0],
        peak_roundings * errors.roundoff * errors.peak + (sums + lost) * peak + MEASURED_FACTOR * errors.noise[1],
    )
    within = _errors_inside(inside, measured, errors, (size, peak))
    carried = numpy.maximum(operands.relative[group], within[0][call])
    carried_peak = numpy.maximum(operands.peak_relative[group], within[1][call])
    # Errors of two factors beyond their own size multiply.
    over, over_peak = (numpy.where(product, numpy.maximum(each, 1.0), 1.0) for each in (carried, carried_peak))
    gain = GAIN * steep
    # Numbers that only moved may be other ones: of statistics, below a roundoff, nothing follows.
    moved = numpy.where(exact & (rows.basis == STATISTICS) & (carried > 0), errors.roundoff, 0.0)
    noise = (noise[0] + moved * size, noise[1] + moved * peak)
    explained = (noise[0] + gain * carried * over * size, noise[1] + gain * carried_peak * over_peak * peak)
    amplified = _amplify(
        measured, errors, operands.relative[group], operands.element_relative[group], explained, (size, peak), of_call
    )
    carried_by_call = numpy.zeros(len(calls.name))
    numpy.maximum.at(carried_by_call, call, carried)
    all_equal = numpy.ones(len(calls.name), dtype=bool)
    numpy.logical_and.at(all_equal, call, operands.equal[group])
    once = has(Trait.ROUNDED_ONCE) & ~is_backward
    return Allowance(noise, explained, amplified, size, carried_by_call, all_equal, exact, once)


def _amplify(
    measured: Measured,
    errors: Errors,
    given: Array,
    elements: Array,
    explained: tuple[Array, Array],
    sizes: tuple[Array, Array],
    traits: Array,
) -> tuple[Array, Array]:
    """Return what is allowed where errors of the inputs may jump, or are divided by small numbers."""
    rows = measured.rows
    decides, divides_by = ((traits & trait) != 0 for trait in (Trait.DECIDES, Trait.DIVIDES))
    jumps = numpy.where(decides & (given > 0), JUMP_FACTOR * numpy.sqrt(numpy.minimum(given, 1)), 0.0)
    divides = numpy.where(divides_by, GAIN * elements, 0.0)
    # Norms of a quotient of two moments do not show elements that are noise: they move by the rate, in any direction.
    names = list(measured.calls.op)
    for at in measured.region_positions:
        names[at] = " ".join(measured.region_calls(at)) if names[at].startswith("Region.optimizer") else ""
    quotients = numpy.array(["addcdiv" in name for name in names], dtype=bool)[rows.call]
    weak = quotients & (rows.basis == STATISTICS) & (given > 0)
    divides = numpy.where(weak, numpy.maximum(divides, QUOTIENTS_OFF), divides)
    # Neither jumps nor divisions of single elements scale a whole result.
    scaled = numpy.isin(rows.call, measured.region_positions) & (rows.basis == VALUES) & (errors.rms_error > 0)
    scaled &= abs(rows.figures["slope"] - 1) * errors.rms > SCALED_SHARE * errors.rms_error
    jumps, divides = numpy.where(scaled, 0.0, jumps), numpy.where(scaled, 0.0, divides)
    peak = numpy.where(jumps > 0, numpy.inf, explained[1] + divides * sizes[1])
    return explained[0] + numpy.maximum(jumps, divides) * sizes[0], peak


def _errors_inside(inside: Inside, measured: Measured, errors: Errors, sizes: tuple[Array, Array]) -> list[Array]:
    """Return for each call the greatest RMS and maximum error of results of the calls inside it, relative to their size."""
    rows = measured.rows
    results = rows.made & (rows.side == 1) & errors.measured & ~errors.exact
    found = []
    for error, size in zip((errors.rms_error, errors.peak_error), sizes, strict=True):
        values = numpy.zeros(len(measured.calls.name))
        numpy.maximum.at(values, rows.call[results], numpy.minimum(error / numpy.maximum(size, _TINY), 1.0)[results])
        found.append(inside.greatest(values))
    return found


def _traits_of_region(names: Sequence[str]) -> Trait:
    """Return the traits of several calls that are judged as one: it moves numbers only if each of them does.

    What a function of the program computes is known from the calls inside it, or from those of the other side.
    """
    ops = [op_of(name) for name in names]
    found = [traits_of(op) for op in ops if not has_parts(op)] or [traits_of(op) for op in ops]
    computing = [traits for traits in found if not traits & Trait.MOVES]
    total = Trait.COMPOSITE if len(computing) > 1 else Trait.NONE if computing else Trait.MOVES
    for traits in computing:
        total |= traits
    return total if len(computing) == 1 else total & ~Trait.ROUNDED_ONCE


def _groups(measured: Measured) -> tuple[Array, int]:
    """Return for each row the group it is computed with: its call or, for an op on lists, the same list position."""
    rows, number = measured.rows, len(measured.calls.name)
    lists = numpy.array(["_foreach_" in op for op in measured.calls.op], dtype=bool)
    group = rows.call.copy()
    places: dict[tuple[int, str], int] = {}
    for row in numpy.flatnonzero(lists[rows.call]).tolist() if lists.any() else ():
        place = (int(rows.call[row]), rows.slot[row].rpartition(".")[2])
        group[row] = places.setdefault(place, number + len(places))
    return group, number + len(places)


class _Operands:
    """Sizes and errors of the inputs of each call, or of each place of an op on lists; for a backward call, with those of its
    forward call."""

    def __init__(self, measured: Measured, errors: Errors, group: Array, groups: int) -> None:
        rows = measured.rows
        self._groups = groups
        inputs = ~rows.made & errors.measured
        floats = inputs & ~errors.exact
        everything = errors.measured & ~errors.exact
        self.relative = self._greatest(group, errors.relative, floats)
        self.roundoff = self._greatest(group, numpy.where(errors.roundoff > _ACCUMULATOR, errors.roundoff, 0.0), floats)
        peak_relative = errors.peak_error / numpy.maximum(errors.peak, _TINY)
        self.peak_relative = numpy.maximum(
            self._greatest(group, numpy.minimum(peak_relative, 1e6), floats), self.relative
        )
        weak = floats & ~errors.equal & (rows.basis == STATISTICS)
        element = _clean(numpy.where(weak, _relative_errors_of_ends(rows.figures), rows.figures["max_rel"]))
        element = numpy.minimum(element, 1e3)
        self.element_relative = self._greatest(group, numpy.where(errors.equal, 0.0, element), floats)
        # Norm and mean of many elements agree better than the elements; the greatest and least are two of these.
        chance = numpy.maximum(numpy.minimum(peak_relative, 1e6), numpy.sqrt(errors.count) * errors.relative)
        self._widen_where_weak(group, weak, self._greatest(group, chance + errors.roundoff, weak))
        self.equal = self._greatest(group, (~errors.equal).astype(float), inputs) == 0
        self.narrower = numpy.zeros(len(measured.calls.name))
        numpy.maximum.at(self.narrower, rows.call[errors.mixed], errors.roundoff[errors.mixed])
        self._all_relative = self._greatest(group, errors.relative, everything)
        self._all_equal = self._greatest(group, (~errors.equal).astype(float), errors.measured) == 0
        self._rms, self._peaks = (self._top_two(group, values, floats) for values in (errors.rms, errors.peak))
        self._counts = self._top_two(group, errors.count, floats)
        centred = numpy.sqrt(numpy.maximum(errors.rms**2 - _clean(rows.figures["baseline_mean"]) ** 2, 0))
        ratio = numpy.where(errors.rms > 0, errors.peak / numpy.maximum(centred, _TINY), 0.0)
        # Use the largest input only: a weight of ones has no spread and says nothing.
        largest = floats & (errors.count >= self._counts[0][group])
        self.offset = self._greatest(group, numpy.minimum(ratio, GREATEST_OFFSET), largest)
        self.range = self._greatest(group, numpy.minimum(errors.peak, GREATEST_RANGE), largest)
        width = _finite_size(rows.figures["baseline_max"] - rows.figures["baseline_min"])
        wide_out = self._greatest(group, width, rows.made & everything)
        wide_in = self._greatest(group, width, floats & (rows.side == 0))
        known = numpy.isfinite(wide_in) & (wide_in > 0)
        self.steepness = numpy.where(known, numpy.clip(wide_out / numpy.where(known, wide_in, 1.0), 1.0, 1e4), 1.0)

    def _widen_where_weak(self, call: Array, weak: Array, own: Array) -> None:
        """Statistics may agree by chance, so inputs without values carry at least the error seen so far, if that much is likely."""
        if not weak.any():
            return
        at = numpy.unique(call[weak])
        for values in (self.relative, self.peak_relative):
            likely = numpy.minimum(numpy.maximum.accumulate(values[at]), CHANCE * own[at])
            values[at] = numpy.maximum(values[at], likely)
        self.element_relative[at] = numpy.maximum(self.element_relative[at], self.relative[at])

    def join_forward(self, forward: Array, linked: Array) -> None:
        """A backward call also uses the inputs and outputs of its forward call."""
        at = forward[linked]
        linked = numpy.concatenate([linked, numpy.zeros(self._groups - len(linked), dtype=bool)])
        forward = numpy.concatenate([forward, numpy.full(self._groups - len(forward), -1)])
        for values, source in (
            (self.relative, self._all_relative),
            (self.peak_relative, self._all_relative),
            (self.element_relative, self.element_relative),
            (self.roundoff, self.roundoff),
            (self.offset, self.offset),
            (self.range, self.range),
        ):
            values[linked] = numpy.maximum(values[linked], source[at])
        self.equal[linked] &= self._all_equal[at]
        self.forward_counts = tuple(
            numpy.where(linked, counts[numpy.maximum(forward, 0)], 1.0) for counts in self._counts
        )
        self._forward_sizes = tuple(
            numpy.where(linked, top[0][numpy.maximum(forward, 0)], 1.0) for top in (self._rms, self._peaks)
        )

    def top(self, call: Array, backward: Array) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
        """Return (RMS, maximum) of the largest and the second largest operand."""
        first = (self._rms[0][call], self._peaks[0][call])
        second = tuple(
            numpy.where(backward, forward[call], top[1][call])
            for forward, top in zip(self._forward_sizes, (self._rms, self._peaks), strict=True)
        )
        return first, second  # type: ignore[return-value]

    def size_of_gradients(self, measured: Measured, errors: Errors) -> Array:
        """Return for each call the RMS of the first argument times the largest of the next three."""
        places = numpy.array(
            [{"input.0": 0, "input.1": 1, "input.2": 1, "input.3": 1}.get(slot, 2) for slot in measured.rows.slot]
        )
        usable = errors.measured & ~errors.exact
        first, others = (self._greatest(measured.rows.call, errors.rms, usable & (places == at)) for at in (0, 1))
        return first * others

    @property
    def counts(self) -> tuple[Array, Array]:
        """Return the element counts of the two largest operands of each call."""
        return self._counts

    def _greatest(self, call: Array, values: Array, mask: Array) -> Array:
        out = numpy.zeros(self._groups)
        numpy.maximum.at(out, call[mask], values[mask])
        return out

    def _top_two(self, call: Array, values: Array, mask: Array) -> tuple[Array, Array]:
        """Return for each call the largest and second largest value; 1 if there is none."""
        first, second = numpy.ones(self._groups), numpy.ones(self._groups)
        at, held = call[mask], values[mask]
        order = numpy.lexsort((held, at))
        at, held = at[order], held[order]
        if len(at):
            last = numpy.append(at[1:] != at[:-1], True)
            first[at[last]] = held[last]
            before = numpy.flatnonzero(last) - 1
            paired = (before >= 0) & (at[before] == at[last])
            second[at[last][paired]] = held[before[paired]]
        return first, second


def _sum_lengths(
    measured: Measured, errors: Errors, operands: _Operands, group: Array, product: Array, reduces: Array, back: Array
) -> Array:
    """Estimate from element counts how many terms are summed for one element of each row."""
    rows = measured.rows
    count = numpy.maximum(errors.count, 1)
    large, small = (values[group] for values in operands.counts)
    shrinks = numpy.maximum(large / count, 1.0)
    of_product = numpy.sqrt(numpy.maximum(large * small / count, 1.0))
    far, near = (values[group] for values in operands.forward_counts)
    # The gradient of one operand is the gradient of the result times the other operand.
    other = numpy.where(count == far, near, far)
    of_gradient = numpy.sqrt(numpy.maximum(large * other / count, 1.0))
    of_product = numpy.where(back, numpy.maximum(of_gradient, shrinks), of_product)
    along = numpy.array([_elements((max(shape, default=1),)) for shape in rows.shapes[0]], dtype=float)
    length = numpy.where(product, numpy.maximum(of_product, shrinks), shrinks)
    return numpy.maximum(numpy.where(reduces, numpy.maximum(length, along), length), 1.0)


def _elements(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return max(0, min(count, 2**62))


def _clean(values: Array) -> Array:
    return numpy.where(numpy.isfinite(values), values, 0.0)


def _finite_size(values: Array) -> Array:
    return numpy.where(numpy.isfinite(values), abs(values), 0.0)


def _greatest_rms(figures: dict[str, Array]) -> Array:
    """Return the largest RMS that numbers with this maximum, minimum and mean can have."""
    greatest, least, mean = (_clean(figures[f"baseline_{name}"]) for name in ("max", "min", "mean"))
    return numpy.asarray(numpy.sqrt(mean**2 + numpy.maximum((greatest - mean) * (mean - least), 0.0)))


def _same_statistics(figures: dict[str, Array], rms: Array, count: Array) -> Array:
    """Return whether two summaries may belong to the same numbers, summed by two devices or tools."""

    def same(name: str, within: Array | float) -> Array:
        ours, theirs = figures[f"baseline_{name}"], figures[f"candidate_{name}"]
        unknown = numpy.isnan(ours) & numpy.isnan(theirs)
        return numpy.asarray((ours == theirs) | unknown | (abs(ours - theirs) <= within))

    norms = figures["baseline_norm"], figures["candidate_norm"]
    # We sum in float64. A norm that fits float32 exactly comes from a tool that sums in float32.
    narrow = numpy.logical_or(*(norm == norm.astype(numpy.float32) for norm in norms))
    within = STATISTICS_ROUNDINGS * numpy.where(narrow, _ACCUMULATOR, _ROUNDOFF_OF_FLOAT64) * rms
    sums = same("mean", within) & same("norm", within * numpy.sqrt(count))
    ends = same("max", 0.0) & same("min", 0.0)
    return numpy.asarray(sums & ends & (figures["nonfinite_different"] <= 0))


def _relative_errors_of_ends(figures: dict[str, Array]) -> Array:
    """Return the larger relative error of least and greatest number: where all have one sign, one of them is next to zero."""
    low, high, *others = (figures[f"{side}_{end}"] for side in ("baseline", "candidate") for end in ("min", "max"))
    off = (
        _difference(other, end) / (_finite_size(end) + _TINY) for other, end in zip(others, (low, high), strict=True)
    )
    return numpy.where(low * high > 0, numpy.maximum(*off), 0.0)


def _difference(one: Array, other: Array) -> Array:
    return numpy.where(one == other, 0.0, _finite_size(one - other))
