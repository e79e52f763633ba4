"""Slots of two calls: by name, and where one side was given by place and the other by name."""

from __future__ import annotations

import pytest

from tensorprobe.model import Call, Slot
from tensorprobe.pairing.call_pairs import pair_slots

BY_PLACE = ["input.0", "input.1", "input.2", "input.3", "input.4", "output.0"]
BY_NAME = [
    "input.0",
    *(f"input.kwargs.{name}" for name in ("bias", "running_mean", "running_var", "weight")),
    "output.0",
]


def call(op: str, names: list[str]) -> Call:
    return Call(name=f"{op}.0.forward", slots=tuple(Slot(name=name, dtype="float32", shape=(4,)) for name in names))


@pytest.mark.parametrize("turned", [False, True])
def test_an_argument_is_the_same_by_place_and_by_name(turned: bool) -> None:
    sides = [call("Functional.batch_norm", BY_PLACE), call("Functional.batch_norm", BY_NAME)]
    pairs, lacking, extra = pair_slots(*(reversed(sides) if turned else sides))
    assert lacking == extra == []
    found = [tuple(slot.name for slot in (reversed(pair) if turned else pair)) for pair in pairs]
    names = ["running_mean", "running_var", "weight", "bias"]
    assert sorted(found) == [
        ("input.0", "input.0"),
        *((f"input.{at}", f"input.kwargs.{name}") for at, name in enumerate(names, start=1)),
        ("output.0", "output.0"),
    ]
    assert [pair[0].name for pair in pairs] == (BY_NAME if turned else BY_PLACE), "in the baseline's order"


@pytest.mark.parametrize(
    ("op", "one", "other"),
    [
        ("Functional.unheard_of", ["input.0", "input.1"], ["input.0", "input.kwargs.weight"]),
        ("Functional.layer_norm", ["input.0", "input.1"], ["input.0", "input.kwargs.weight"]),
        ("Functional.linear", ["input.0", "input.1"], ["input.0", "input.kwargs.bias"]),
    ],
)
def test_what_is_not_known_to_be_the_same_is_not_paired(op: str, one: list[str], other: list[str]) -> None:
    pairs, lacking, extra = pair_slots(call(op, one), call(op, other))
    assert [pair[0].name for pair in pairs] == ["input.0"]
    assert (lacking, extra) == (one[1:], other[1:])


def test_two_ops_have_no_places_in_common() -> None:
    _, lacking, extra = pair_slots(
        call("Functional.linear", ["input.1"]), call("Torch.linear", ["input.kwargs.weight"])
    )
    assert (lacking, extra) == (["input.1"], ["input.kwargs.weight"])
