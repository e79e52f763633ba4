"""Parameters that one program holds as one, and the other in parts."""

from __future__ import annotations

from tensorprobe.model import Call, Slot
from tensorprobe.pairing.fused import split_fused

FLOAT = 4


def linear(name: str, rows: int, width: int = 16, offset: int | None = 0) -> Call:
    held = Slot(
        name="input.1",
        dtype="float32",
        shape=(rows, width),
        role=f"parameter {name}",
        digest=f"of {name}",
        offset=offset,
        nbytes=rows * width * FLOAT,
    )
    return Call(
        name="Functional.linear.0.forward", slots=(Slot(name="input.0", dtype="float32", shape=(2, width)), held)
    )


def test_a_fused_parameter_is_seen_as_the_parts_that_follow_each_other_in_the_other_program() -> None:
    three = [linear("q.weight", 16), linear("k.weight", 8), linear("v.weight", 8)]
    one = [linear("qkv.weight", 32, offset=128)]
    ours, theirs = split_fused((one, three))
    assert theirs == three and ours[0] is not None
    parts = ours[0].slots[1:]
    assert [slot.role for slot in parts] == ["parameter q.weight", "parameter k.weight", "parameter v.weight"]
    assert [(slot.shape, slot.offset, slot.nbytes) for slot in parts] == [
        ((16, 16), 128, 1024),
        ((8, 16), 1152, 512),
        ((8, 16), 1664, 512),
    ]
    assert len({slot.name for slot in parts}) == len({slot.digest for slot in parts}) == 3
    assert split_fused((three, one)) == (theirs, ours)


def test_parameters_without_values_stay_whole() -> None:
    """Statistics have no parts: nothing of the parameters would be measured, and the runs would agree."""
    whole, parts = [linear("qk.weight", 16)], [linear("q.weight", 8), linear("k.weight", 8, offset=None)]
    assert split_fused((whole, parts)) == (whole, parts)
    assert split_fused((whole, [parts[0], linear("k.weight", 8)])) != (whole, parts)


def test_rows_that_do_not_add_up_are_no_parts() -> None:
    calls = [linear("qkv.weight", 32)], [linear("q.weight", 16), linear("k.weight", 8)]
    assert split_fused(calls) == calls


def test_parts_that_begin_within_a_block_of_the_file_stay_whole() -> None:
    calls = [linear("qk.bias", 4, width=3)], [linear("q.bias", 2, width=3), linear("k.bias", 2, width=3)]
    assert split_fused(calls) == calls
