"""Why something was not recorded, measured or compared. The values are the words on disk and in the result; code compares members.

`Unrecorded` and `Skipped` read foreign or older text with `of`: words that no member has become `OTHER`.
"""

from __future__ import annotations

from enum import Enum


class Unrecorded(str, Enum):
    """Why a slot of a run has neither values nor statistics: the field `skipped` of format 1."""

    WRITTEN_ONLY = "only written to by the call"
    UNINITIALISED = "memory not yet initialised"
    OTHER = ""
    """The text names a layout, a dtype, a tensor subclass, an error, or what another tool says."""

    __str__ = str.__str__

    @classmethod
    def of(cls, text: str) -> Unrecorded:
        """Return the member with this text, else OTHER."""
        return _UNRECORDED.get(text, cls.OTHER)


_UNRECORDED = {member.value: member for member in Unrecorded}


class Unmeasured(str, Enum):
    """Why a pair of slots was not measured. The note of the row has these words, or more precise ones."""

    UNRECORDED = "not recorded"
    UNINITIALISED = "memory not yet initialised"
    SHAPE = "other shape"
    HIDDEN = "a NaN on both sides, and nothing is known of the other elements"
    DTYPE = "unknown dtype"
    DAMAGED = "damaged"

    __str__ = str.__str__


class Skipped(str, Enum):
    """Why a call is not compared: a key of `Buckets.skipped`."""

    DAMAGED_LINE = "damaged line"
    PARTNER_DAMAGED = "its partner's line may be a damaged one"
    FILE_SHORTENED = "its file became shorter while it was read"
    AGAIN_IN_BASELINE = "computed again in the baseline only"
    AGAIN_IN_CANDIDATE = "computed again in the candidate only"
    NOTHING_TO_DO = "backward of a copy or cast that had nothing to do on the other side"
    OTHER_TOOL = "recorded by only one of the two tools"
    OTHER_OPTIMIZER = "of an optimizer; the other dump has none of its calls, as where it updates lists of tensors"
    RANK_ONLY_IN_BASELINE = "rank only in baseline"
    RANK_ONLY_IN_CANDIDATE = "rank only in candidate"
    STEP_ONLY_IN_BASELINE = "step only in baseline"
    STEP_ONLY_IN_CANDIDATE = "step only in candidate"
    OTHER_PHASE = "in a phase that was not selected"
    AFTER_END_OF_BASELINE = "after the end of the baseline"
    AFTER_END_OF_CANDIDATE = "after the end of the candidate"

    __str__ = str.__str__

    @property
    def is_damage(self) -> bool:
        """Whether a damaged line of a run is the cause."""
        return self in (Skipped.DAMAGED_LINE, Skipped.PARTNER_DAMAGED)


class NotCompared(str, Enum):
    """Why the online compare does not run an op twice. Texts that name a library, a layout or an error are no member."""

    VIEW = "view"
    RANDOM = "random"
    MEMORY = "uninitialised memory"
    COLLECTIVE = "collective: needs the other processes"
    NO_TENSOR = "returns no tensor"
    STORAGE = "changes storage, not numbers"
    HIGHER_ORDER = "higher-order op: the ops it calls are compared instead"

    __str__ = str.__str__


class NotReplayed(str, Enum):
    """Why a call is not run again by precheck, audit or a proof. Texts that name a slot, a device or an error are no member."""

    NO_ARGUMENTS = "its arguments were not recorded, only its tensors"
    NO_VALUES = "not all of its values were recorded"
    NO_OUTPUTS = "its outputs were not recorded"
    ONLY_STATISTICS = "only statistics were recorded"
    LINE_MISSING = "its line in the run was not found"
    LINE_DAMAGED = "its line in the run is damaged"
    COLLECTIVE = "it is a collective"
    NO_TENSOR = "it returns no tensor"
    ELSEWHERE = "it looks at memory beyond its input, which the record does not hold"
    RAISES = "it raises on the CPU too"
    NO_TIME = "not reached in the time allowed"
    OVER_BUDGET = "beyond the budget"
    NO_TORCH = "torch is not installed"

    __str__ = str.__str__
