"""What a precheck says that it saved is there."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tensorprobe.checks import precheck
from tensorprobe.errors import NotFound
from tensorprobe.model import Call, Slot
from tensorprobe.replay.once import autocast_dtype
from tests.builders.runs import write
from tests.checks.deadly_ops import harmless

pytestmark = pytest.mark.usefixtures("warm_processes")


@pytest.mark.parametrize("jobs", [0, 1])
def test_what_is_saved_of_the_very_first_call_stays(tmp_path: Path, jobs: int) -> None:
    """A failure is saved before its outcome comes; what an earlier precheck had saved goes before that."""
    run, out = write(tmp_path / "run", [harmless(0, 1000)]), tmp_path / "out"
    for _ in range(2):
        result = precheck(run, standard="binary", jobs=jobs, save_failures=True, out=out)
        (script,) = result.replays.values()
        assert Path(script).is_file()
        assert Path(script).with_suffix(".safetensors").is_file()
        (out / "failures" / "of an earlier one.py").touch()
    assert sorted(path.name for path in (out / "failures").iterdir()) == [
        "Torch.exp.0.forward.py",
        "Torch.exp.0.forward.safetensors",
        "of an earlier one.py",
    ]
    precheck(run, jobs=jobs, out=out)
    assert not (out / "failures").exists()


def test_the_hint_for_a_name_that_is_not_there_lists_the_step_that_was_looked_at(tmp_path: Path) -> None:
    run = write(tmp_path / "a run", [harmless(0)])
    with pytest.raises(NotFound, match=r"tensorprobe inspect '.*/a run' --step 0"):
        precheck(run, calls="?")


@pytest.mark.parametrize(("op", "found"), [("Functional.linear", torch.bfloat16), ("Torch.where", None)])
def test_autocast_shows_in_the_inputs_of_a_dump_without_outputs(op: str, found: torch.dtype | None) -> None:
    slots = (Slot("input.0", "bfloat16", (2, 3)), Slot("input.1", "float32", (4, 3)))
    assert autocast_dtype(Call(f"{op}.0.forward", slots=slots)) is found
