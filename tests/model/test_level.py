"""Levels: what they are called on disk, and what they can do."""

from __future__ import annotations

import json

import msgspec
import pytest

from tensorprobe.model import Call, CaptureLevel, Level
from tensorprobe.model.call import forward_name


@pytest.mark.parametrize("level", [*Level, *CaptureLevel])
def test_a_level_is_written_as_its_word(level: Level | CaptureLevel) -> None:
    word = level.value
    assert f"{level}" == str(level) == level == word
    assert msgspec.json.encode(level) == json.dumps(level).encode() == f'"{word}"'.encode()


def test_a_call_on_disk_has_one_of_the_three_levels() -> None:
    assert msgspec.json.decode(b'{"name": "x.0.forward", "level": "aten"}', type=Call).level is Level.ATEN
    assert msgspec.json.encode(Call(name="x.0.forward")) == b'{"name":"x.0.forward"}'
    with pytest.raises(msgspec.ValidationError, match="level"):
        msgspec.json.decode(b'{"name": "x.0.forward", "level": "mix"}', type=Call)


@pytest.mark.parametrize("level", Level)
def test_a_backward_call_is_named_after_its_forward_call(level: Level) -> None:
    forward, backward = level.call_names("Torch.mm", 3)
    assert forward_name(backward) == forward
    call = Call(name=forward)
    assert (call.op, call.number, call.direction) == ("Torch.mm", 3, "forward")


def test_what_each_capture_level_records() -> None:
    recorded = {level: (level.has_modules, level.has_api, level.has_aten, level.sees_api) for level in CaptureLevel}
    assert recorded == {
        "module": (True, False, False, False),
        "api": (False, True, False, True),
        "aten": (False, False, True, True),
        "mix": (True, True, False, True),
    }
