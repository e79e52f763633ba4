"""Find the candidate's call for each call of the baseline, from names and shapes, never from values.

In: the index entries of both sides in execution order, and a function that returns the details of a side. It is called
only if names are not enough. Out: an `Alignment`, in which every call is in exactly one bucket.

1. Calls that the user's map names are paired first.
2. Leading calls (forward calls; at level aten both directions) are paired by name and number, if both sides called each
   common op equally often. Otherwise, or if the order of the ops shows that numbers have shifted, they are paired by order:
   first those with equal op, module and signature, then, between those, equal op and module, then equal op. So one missing
   call does not shift the others. If numbers have gaps (a selection, a damaged line), such calls are paired by number alone,
   unless their modules show that numbers have shifted.
3. Following calls: a backward call is paired as its forward call is, a recomputed call as the call it repeats. If one side
   lost the leading call (a damaged line), the following call is paired by name.
4. Calls without a leading call, because only backward calls were recorded, are paired as in 2.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Literal, NamedTuple

import numpy as np

from tensorprobe.ops.names import canonical_op, op_without_prefix, without_prefix
from tensorprobe.pairing.call_columns import (
    CallFinder,
    Columns,
    Detail,
    Vocabulary,
    common_numbers,
    has_holes,
    number_values,
    read_columns,
    read_details,
)
from tensorprobe.pairing.codes import Column, Mask, dense_both, join, pack_both, remaining
from tensorprobe.pairing.mapping import NameMap
from tensorprobe.pairing.nearest import Suggestion, Suggestions, nothing_paired_hint
from tensorprobe.pairing.sequence import METHODS, Matches, Method, OrderSearch, tokens_from_fine_to_coarse
from tensorprobe.record.run import Entry

__all__ = [
    "Alignment",
    "Detail",
    "Options",
    "RunSideName",
    "Suggestion",
    "Suggestions",
    "align_calls",
    "nothing_paired_hint",
]

RunSideName = Literal["baseline", "candidate"]
How = Literal["name", "sequence", "map"]
_SIDES: tuple[RunSideName, RunSideName] = ("baseline", "candidate")
_HOWS: tuple[How, ...] = ("name", "sequence", "map")
_NAME, _SEQUENCE, _MAP = range(3)


@dataclass(frozen=True)
class Options:
    """What the user asked for. `fuzzy` pairs by order, op and direction only, and ignores numbers, modules and shapes."""

    mapping: NameMap | None = None
    strip_prefix: str | None = None
    fuzzy: bool = False

    @property
    def renames(self) -> tuple[Callable[[str], str], Callable[[str], str]]:
        """What gives the paths of modules and parameters of both sides one name."""
        prefix, mapping = self.strip_prefix, self.mapping or NameMap()
        return (
            lambda path: without_prefix(path, prefix),
            lambda path: mapping.rename_module(without_prefix(path, prefix)),
        )


PLAIN = Options()
"""The defaults."""


@dataclass
class Alignment:
    """Which calls are pairs. Positions refer to the two lists of entries; pairs are in the baseline's execution order."""

    pairs: list[tuple[int, int]]
    only_baseline: list[int]
    only_candidate: list[int]
    how: dict[str, int] = field(default_factory=dict)
    """How the pairs were found (name, sequence or map) → number of pairs; only those that occur."""
    method: Method = "exact"
    """The coarsest method that was needed to pair calls by order."""
    unused_map: list[str] = field(default_factory=list)
    """Lines of the user's map that match none of these calls."""

    def self_check(self, baseline_count: int, candidate_count: int) -> None:
        """Raise AssertionError unless every position of both sides is in exactly one bucket."""
        for side, only, count, at in (
            ("baseline", self.only_baseline, baseline_count, 0),
            ("candidate", self.only_candidate, candidate_count, 1),
        ):
            held = [pair[at] for pair in self.pairs] + only
            if sorted(held) != list(range(count)):
                twice = [position for position, times in Counter(held).items() if times > 1]
                lost = sorted(set(range(count)).difference(held))
                raise AssertionError(
                    f"{len(held)} positions for {count} calls of the {side}: in two buckets {twice[:5]}, in none {lost[:5]}"
                )
        if sum(self.how.values()) != len(self.pairs):
            raise AssertionError(f"{len(self.pairs)} pairs, but {self.how} found")


def align_calls(
    baseline: Sequence[Entry],
    candidate: Sequence[Entry],
    details: Callable[[RunSideName], Sequence[Detail]],
    options: Options = PLAIN,
) -> Alignment:
    """Return the alignment of two sequences of calls, each in execution order."""
    details = cache(details)
    first_difference = next(
        ((left[1:], right[1:]) for left, right in zip(baseline, candidate, strict=False) if left[1:] != right[1:]), None
    )
    if first_difference is None and len(baseline) == len(candidate) and options.mapping is None:
        everything = range(len(baseline))
        return Alignment([*zip(everything, everything, strict=True)], [], [], how=_how_counts([(_NAME, len(baseline))]))
    if options == PLAIN:
        same_names = _pairs_of_same_names(baseline, candidate, details)
        if same_names is not None:
            return Alignment(same_names, [], [], how=_how_counts([(_NAME, len(baseline))]))
    if first_difference is None:
        swapped = len(candidate) < len(baseline)
    else:
        swapped = first_difference[1] < first_difference[0]
    work = _Work(baseline, candidate, details, options, swapped=swapped)
    if options.mapping is not None:
        work.pair_mapped_calls(options.mapping)
        work.follow()
    work.pair_rows(*(side.leads & (partner < 0) for side, partner in zip(work.sides, work.partners, strict=True)))
    work.follow()
    work.pair_orphans()
    work.pair_rows(*work.leaderless())
    return work.result()


def _pairs_of_same_names(
    baseline: Sequence[Entry], candidate: Sequence[Entry], details: Callable[[RunSideName], Sequence[Detail]]
) -> list[tuple[int, int]] | None:
    """Return the pairs if both sides have the same names, each once, in the same modules; else None.

    This shortcut serves runs whose calls differ only in their order, because threads took turns differently.
    """
    if len(baseline) != len(candidate):
        return None
    rows = {entry[1:]: row for row, entry in enumerate(candidate)}
    partners = [rows.get(entry[1:], -1) for entry in baseline]
    if len(rows) != len(candidate) or len(set(partners)) != len(partners) or -1 in partners:
        return None
    others = details("candidate")
    if any(detail.module != others[row].module for detail, row in zip(details("baseline"), partners, strict=True)):
        return None
    return [*enumerate(partners)]


def _how_counts(counted: Sequence[tuple[int, int]]) -> dict[str, int]:
    return {_HOWS[how]: count for how, count in counted if count}


class _DetailColumns(NamedTuple):
    """Columns of both sides: level and module, signature."""

    modules: tuple[Column, Column]
    signatures: tuple[Column, Column]


def _known_to_both(
    calls: tuple[Column, Column], kinds: tuple[Column, Column]
) -> tuple[tuple[Column, Column], tuple[Column, Column]]:
    """Return the calls, and their kinds, whose kind occurs on the other side too."""
    known = np.isin(kinds[0], kinds[1]), np.isin(kinds[1], kinds[0])
    return (calls[0][known[0]], calls[1][known[1]]), (kinds[0][known[0]], kinds[1][known[1]])


def _have_numbers_shifted(by_name: tuple[Column, Column], by_order: Matches, modules: tuple[Column, Column]) -> bool:
    """Return whether each side lacks another call of an op.

    If so, pairing by order puts more calls beside calls of the same module than pairing by number does, and leaves few
    calls without a partner.
    """
    named, ordered = (int((modules[0][rows] == modules[1][others]).sum()) for rows, others in (by_name, by_order[:2]))
    return ordered > named and 10 * ordered >= 9 * len(modules[0])


class _Work:
    """An alignment while it is made.

    `partners[0][row]` is the candidate's row for the baseline's row, or -1; `partners[1]` is the reverse.
    """

    def __init__(
        self,
        baseline: Sequence[Entry],
        candidate: Sequence[Entry],
        details: Callable[[RunSideName], Sequence[Detail]],
        options: Options,
        *,
        swapped: bool,
    ) -> None:
        self._details = details
        self._options = options
        # If two alignments are equally good, the order of the sides decides between them: always use the same order.
        self._swapped = swapped
        self._vocabulary = Vocabulary()
        self._method: Method = "exact"
        self._unused: list[str] = []
        prefix, mapping = options.strip_prefix, options.mapping or NameMap()
        self._rename_paths = options.renames
        ours = read_columns(baseline, self._vocabulary, lambda op: op_without_prefix(op, prefix))
        by_path = {op.rpartition(".")[0]: op for op in self._vocabulary.ops if op.startswith("Module.")}

        def rename(op: str) -> str:
            renamed = mapping.rename_op(op_without_prefix(op, prefix))
            # Two programs may give the class of a module another name: its path says which one it is.
            return renamed if renamed in self._vocabulary.ops else by_path.get(renamed.rpartition(".")[0], renamed)

        self.sides: tuple[Columns, Columns] = ours, read_columns(candidate, self._vocabulary, rename)
        self._rules = [mapping.rule_for(op_without_prefix(canonical_op(op), prefix)) for op in self.sides[1].spellings]
        """The rule of the map for each spelling of an op in the candidate."""
        renamed = np.array([rule is not None for rule in self._rules], dtype=np.bool_)
        self._renamed = renamed[self.sides[1].spelling]
        self.partners: tuple[Column, Column] = (
            np.full(len(baseline), -1, dtype=np.int64),
            np.full(len(candidate), -1, dtype=np.int64),
        )
        self._how = np.full(len(baseline), _NAME, dtype=np.int64)
        self._detail_columns: tuple[tuple[Column, Column], ...] | None = None
        self._numbers = [common_numbers(side, self._vocabulary) for side in self.sides]

    def _pair(self, rows: Column, partners: Column, how: int | Column) -> None:
        self.partners[0][rows] = partners
        self.partners[1][partners] = rows
        self._how[rows] = np.where(self._renamed[partners], _MAP, how)

    def pair_mapped_calls(self, mapping: NameMap) -> None:
        """Pair the calls that the user's map names, each repetition with the same repetition."""
        finders = [
            CallFinder(side, self._vocabulary, [pair[at] for pair in mapping.calls])
            for at, side in enumerate(self.sides)
        ]
        for pair in mapping.calls:
            rows, columns = (finder.rows(name) for finder, name in zip(finders, pair, strict=True))
            rows, columns = rows[self.partners[0][rows] < 0], columns[self.partners[1][columns] < 0]
            baseline, candidate = self.sides
            found = join(
                *pack_both(
                    (baseline.backward[rows], baseline.repeat[rows]),
                    (candidate.backward[columns], candidate.repeat[columns]),
                )
            )
            if len(found[0]):
                self._pair(rows[found[0]], columns[found[1]], _MAP)
            else:
                self._unused.append(f"{pair.baseline} = {pair.candidate}")

    def pair_rows(self, in_baseline: Mask, in_candidate: Mask) -> None:
        """Pair some rows by name if names are enough, else by order."""
        rows, columns = np.flatnonzero(in_baseline), np.flatnonzero(in_candidate)
        if not len(rows) or not len(columns):
            return
        baseline, candidate = self.sides
        kinds = pack_both(
            (baseline.op[rows], baseline.backward[rows], baseline.repeat[rows]),
            (candidate.op[columns], candidate.backward[columns], candidate.repeat[columns]),
        )
        (rows, columns), kinds = _known_to_both((rows, columns), kinds)
        if not len(rows):
            return
        if self._options.fuzzy:
            search = OrderSearch(kinds, swapped=self._swapped)
            search.find(kinds)
            self._pair_by_order(rows, columns, Matches(*search.found, search.method))
            return
        by_name = self._by_name(rows, columns, kinds)
        own = np.zeros(len(rows), dtype=np.bool_)
        if by_name is None:
            own, kinds = self._with_own_numbers(rows, columns, kinds)
            (known, known_columns), kinds = _known_to_both((np.arange(len(rows)), np.arange(len(columns))), kinds)
            rows, columns, own = rows[known], columns[known_columns], own[known]
            by_name = self._by_name(rows, columns, kinds)
        if by_name is None or not np.array_equal(*kinds):
            traits = self._details_of(rows, columns)
            by_order = self._by_order(rows, columns, kinds, traits)
            if by_name is None or _have_numbers_shifted(by_name, by_order, traits.modules):
                # Calls that are paired by number took part in the search only to keep the others in order.
                others = ~own[by_order.baseline]
                found = Matches(by_order.baseline[others], by_order.candidate[others], by_order.method)
                self._pair_by_order(rows, columns, found)
                same = join(*kinds)
                by_name = same[0][own[same[0]]], same[1][own[same[0]]]
        self._pair(rows[by_name[0]], columns[by_name[1]], _NAME)

    def _pair_by_order(self, rows: Column, columns: Column, found: Matches) -> None:
        self._pair(rows[found.baseline], columns[found.candidate], _SEQUENCE)
        self._method = max(self._method, found.method, key=METHODS.index)

    def _with_own_numbers(
        self, rows: Column, columns: Column, kinds: tuple[Column, Column]
    ) -> tuple[Mask, tuple[Column, Column]]:
        """Return which rows of the baseline are paired by number alone, and the kinds of both sides with those numbers."""
        values = number_values(self._vocabulary)
        numbers = self.sides[0].number[rows], self.sides[1].number[columns]
        holes = (
            has_holes(kinds[0], values[numbers[0]], kinds[1]),
            has_holes(kinds[1], values[numbers[1]], kinds[0]),
        )
        counted_anew = self.sides[0].respelled[rows], self.sides[1].respelled[columns]
        own = np.union1d(kinds[0][holes[0] & ~counted_anew[0]], kinds[1][holes[1] & ~counted_anew[1]])
        own = np.setdiff1d(own, np.union1d(kinds[0][counted_anew[0]], kinds[1][counted_anew[1]]))
        if len(own):
            own = np.setdiff1d(own, self._shifted_kinds(rows, columns, kinds, own))
        masks = np.isin(kinds[0], own), np.isin(kinds[1], own)
        return masks[0], pack_both(
            (kinds[0], np.where(masks[0], numbers[0] + 1, 0)), (kinds[1], np.where(masks[1], numbers[1] + 1, 0))
        )

    def _shifted_kinds(self, rows: Column, columns: Column, kinds: tuple[Column, Column], own: Column) -> Column:
        """Return the kinds whose equal numbers are in different modules, although both sides share a module for that kind.

        For these, the two sides left out different calls: calls of the same module belong together.
        """
        at = np.flatnonzero(np.isin(kinds[0], own)), np.flatnonzero(np.isin(kinds[1], own))
        rows, columns = rows[at[0]], columns[at[1]]
        codes = dense_both(kinds[0][at[0]], kinds[1][at[1]])
        modules = self._details_of(rows, columns).modules
        named = [~np.isin(module, self._without_module()) for module in modules]
        size = 1 + int(max(code.max(initial=0) for code in codes))
        shared = join(
            *pack_both(*((code[is_], module[is_]) for code, module, is_ in zip(codes, modules, named, strict=True)))
        )
        in_one_module = np.bincount(codes[0][named[0]][shared[0]], minlength=size) > 0
        pairs = join(*pack_both((codes[0], self.sides[0].number[rows]), (codes[1], self.sides[1].number[columns])))
        both_named = named[0][pairs[0]] & named[1][pairs[1]]
        alike = modules[0][pairs[0]] == modules[1][pairs[1]]
        agree = np.bincount(codes[0][pairs[0]][both_named & alike], minlength=size)
        clash = np.bincount(codes[0][pairs[0]][both_named & ~alike], minlength=size)
        shifted: Column = kinds[0][at[0]][(in_one_module & (agree <= clash))[codes[0]]]
        return shifted

    def _by_name(self, rows: Column, columns: Column, kinds: tuple[Column, Column]) -> tuple[Column, Column] | None:
        """Return the pairs by name and number; None when a call of an op that both sides have has no partner."""
        if len(rows) != len(columns):
            return None
        numbers = self._numbers
        if numbers[0] is None or numbers[1] is None:
            return None
        found = join(*pack_both((kinds[0], numbers[0][rows]), (kinds[1], numbers[1][columns])))
        return found if len(found[0]) == len(rows) else None

    def _by_order(self, rows: Column, columns: Column, kinds: tuple[Column, Column], traits: _DetailColumns) -> Matches:
        modules = traits.modules
        search = OrderSearch(kinds, swapped=self._swapped)
        for tokens in tokens_from_fine_to_coarse(kinds, modules, traits.signatures, self._without_module()):
            search.find(tokens)
        search.find_where_counts_agree(kinds)
        # Threads may take turns differently: equal name, number and module mean the same call in another position.
        left = remaining(len(rows), search.found[0]), remaining(len(columns), search.found[1])
        moved = join(
            *pack_both(
                *(
                    (kind[at], module[at], side.number[calls[at]])
                    for kind, module, side, calls, at in zip(
                        kinds, modules, self.sides, (rows, columns), left, strict=True
                    )
                )
            )
        )
        found, partners = (
            np.concatenate((old, at[new])) for old, at, new in zip(search.found, left, moved, strict=True)
        )
        return Matches(found, partners, search.method)

    def _details_of(self, rows: Column, columns: Column) -> _DetailColumns:
        if self._detail_columns is None:
            self._detail_columns = tuple(
                read_details(self._details(side), self._vocabulary, rename)
                for side, rename in zip(_SIDES, self._rename_paths, strict=True)
            )
        (modules, signatures), (other_modules, other_signatures) = self._detail_columns
        return _DetailColumns((modules[rows], other_modules[columns]), (signatures[rows], other_signatures[columns]))

    def _without_module(self) -> Column:
        """Return the codes of details without a module path."""
        return np.array([number for (_, path), number in self._vocabulary.modules.items() if not path], dtype=np.int64)

    def follow(self) -> None:
        """Pair the calls that follow a leading call with those that follow its partner."""
        baseline, candidate = self.sides
        leaders = np.flatnonzero(baseline.leads & (self.partners[0] >= 0))
        rows = np.flatnonzero(~baseline.leads & (self.partners[0] < 0))
        columns = np.flatnonzero(~candidate.leads & (self.partners[1] < 0))
        if not len(leaders) or not len(rows) or not len(columns):
            return
        stems, first = np.unique(baseline.stem[leaders], return_index=True)
        leaders = leaders[first]
        at = np.searchsorted(stems, baseline.stem[rows]).clip(max=len(stems) - 1)
        follows = stems[at] == baseline.stem[rows]
        rows, leaders = rows[follows], leaders[at[follows]]
        found = join(
            *pack_both(
                (candidate.stem[self.partners[0][leaders]], baseline.backward[rows], baseline.repeat[rows]),
                (candidate.stem[columns], candidate.backward[columns], candidate.repeat[columns]),
            )
        )
        self._pair(rows[found[0]], columns[found[1]], self._how[leaders[found[0]]])

    def pair_orphans(self) -> None:
        """Pair by name the calls whose leading call is unpaired on one side and lost on the other."""
        if not all(side.leads.any() for side in self.sides):
            return
        free, orphaned, keys = [], [], []
        for side, partners in zip(self.sides, self.partners, strict=True):
            alone = side.stem[side.leads & (partners < 0)]
            rows = np.flatnonzero(~side.leads & (partners < 0) & ~side.respelled)
            is_orphan = ~np.isin(side.stem[rows], side.stem[side.leads])
            looks = is_orphan | np.isin(side.stem[rows], alone)
            rows = rows[looks]
            free.append(rows)
            orphaned.append(is_orphan[looks])
            keys.append((side.op[rows], side.number[rows], side.backward[rows], side.repeat[rows]))
        found = join(*pack_both(*keys))
        of_one = orphaned[0][found[0]] != orphaned[1][found[1]]
        self._pair(free[0][found[0][of_one]], free[1][found[1][of_one]], _NAME)

    def leaderless(self) -> tuple[Mask, Mask]:
        """Return which following calls have no leading call; all of them, if one side has no leading calls at all."""
        one_sided = any(not side.leads.any() for side in self.sides)
        free = []
        for side, partners in zip(self.sides, self.partners, strict=True):
            mask = (partners < 0) & ~side.leads
            if not one_sided:
                rows = np.flatnonzero(mask)
                mask[rows] = ~np.isin(side.stem[rows], side.stem[side.leads]) if len(rows) else False
            free.append(mask)
        return free[0], free[1]

    def result(self) -> Alignment:
        """Return the finished alignment."""
        paired = np.flatnonzero(self.partners[0] >= 0)
        counts = np.bincount(self._how[paired], minlength=len(_HOWS)).tolist()
        if self._options.mapping is not None:
            self._unused = self._unused_rules(self._options.mapping) + self._unused
        return Alignment(
            pairs=[*zip(paired.tolist(), self.partners[0][paired].tolist(), strict=True)],
            only_baseline=np.flatnonzero(self.partners[0] < 0).tolist(),
            only_candidate=np.flatnonzero(self.partners[1] < 0).tolist(),
            how=_how_counts([*enumerate(counts)]),
            method=self._method,
            unused_map=self._unused,
        )

    def _unused_rules(self, mapping: NameMap) -> list[str]:
        """Return the rules for ops that led to no pair.

        Where no calls of modules were recorded, a rule for modules renames the module paths of other calls, and parameters.
        """
        side = self.sides[1]
        used = {self._rules[spelling] for spelling in np.unique(side.spelling[self.partners[1] >= 0]).tolist()}
        if any("Module" in rule for rule in mapping.ops):
            prefix = self._options.strip_prefix
            ours, theirs = (
                {
                    f"Module.{without_prefix(path, prefix)}"
                    for each in self._details(side)
                    for path in (each.module, *each.parameters)
                }
                for side in _SIDES
            )
            used |= {mapping.rule_for(path) for path in theirs if mapping.rename_op(path) in ours}
        return [f"{ours} = {theirs}" for theirs, ours in mapping.ops.items() if theirs not in used]
