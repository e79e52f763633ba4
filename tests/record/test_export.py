"""Exported files hold what the run holds, and every slot is written or counted as left out."""

from __future__ import annotations

from pathlib import Path

import numpy
import pytest
import torch
from safetensors.torch import load_file

from tensorprobe.errors import NotFound, RunExists, SettingsError
from tensorprobe.record import export_run, open_run
from tensorprobe.record.export import MAX_FILE_NAME, safe_file_name
from tests.builders.runs import Blob, slot, write_run


@pytest.fixture
def run_path(tmp_path: Path) -> Path:
    content = Blob()
    floats = torch.arange(6, dtype=torch.float32)
    half = torch.tensor([1.5, -2.0], dtype=torch.bfloat16)
    slots = [
        slot("input.0", "float32", [3, 2], floats.numpy().tobytes(), content, stride=[1, 3]),
        slot("input.1", "bfloat16", [2], half.view(torch.int16).numpy().tobytes(), content),
        slot("output.0", "float32", [6], floats.numpy().tobytes(), content),
        slot("output.1", "complex32", [1], bytes(4), content),
        {"name": "output.2", "dtype": "float32", "shape": [3], "skipped": "sparse layout"},
        {**slot("output.3", "float32", [1], bytes(4), content), "offset": 1 << 30},
    ]
    calls = [{"name": "Torch.mm.0.forward", "slots": slots}, {"name": "Torch.add.0.forward", "slots": slots[:1]}]
    write_run(tmp_path / "run", calls, content.content)
    return tmp_path / "run"


def test_npy_files_hold_the_values(run_path: Path, tmp_path: Path) -> None:
    done = export_run(open_run(run_path), tmp_path / "out", to="npy", call="Torch.mm.*")
    folder = tmp_path / "out/step0/rank0"
    assert sorted(path.name for path in folder.iterdir()) == [
        f"Torch.mm.0.forward.{name}.npy" for name in ("input.0", "input.1", "output.0", "output.1")
    ]
    assert numpy.load(folder / "Torch.mm.0.forward.input.0.npy").tolist() == [[0, 3], [1, 4], [2, 5]]
    assert numpy.load(folder / "Torch.mm.0.forward.input.1.npy").tolist() == [1.5, -2.0]
    assert (done.files, done.tensors, dict(done.left_out)) == (4, 4, {"sparse layout": 1, "damaged": 1})


def test_safetensors_file_holds_the_values(run_path: Path, tmp_path: Path) -> None:
    done = export_run(open_run(run_path), tmp_path / "out", to="safetensors")
    tensors = load_file(tmp_path / "out/step0/rank0.safetensors")
    assert sorted(tensors) == [
        "Torch.add.0.forward.input.0",
        *(f"Torch.mm.0.forward.{name}" for name in ("input.0", "input.1", "output.0")),
    ]
    assert tensors["Torch.mm.0.forward.input.0"].tolist() == [[0, 3], [1, 4], [2, 5]]
    assert tensors["Torch.mm.0.forward.output.0"].tolist() == [0, 1, 2, 3, 4, 5]
    assert tensors["Torch.mm.0.forward.input.1"].dtype == torch.bfloat16
    assert done.left_out == {"sparse layout": 1, "damaged": 1, "safetensors has no complex32": 1}


def test_choice_by_name_without_glob_takes_both_directions(run_path: Path, tmp_path: Path) -> None:
    done = export_run(open_run(run_path), tmp_path / "out", to="npy", call="Torch.add.0")
    assert done.tensors == 1


def test_damaged_lines_are_counted(run_path: Path, tmp_path: Path) -> None:
    calls = run_path / "step0/rank0/calls.jsonl"
    calls.write_bytes(b"{\n" + calls.read_bytes())
    done = export_run(open_run(run_path), tmp_path / "out", to="npy")
    assert (done.damaged_lines, done.tensors) == (1, 5)


@pytest.mark.parametrize("what", ["file inside", "is a file"])
def test_folder_that_holds_something_is_refused(what: str, run_path: Path, tmp_path: Path) -> None:
    target = tmp_path / "out"
    if what == "is a file":
        target.write_text("x")
    else:
        target.mkdir()
        (target / "x").write_text("x")
    with pytest.raises(RunExists, match="not an empty folder"):
        export_run(open_run(run_path), target, to="npy")


def test_nothing_chosen_is_an_error(run_path: Path, tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=r"no call matches 'Nothing\.\*'"):
        export_run(open_run(run_path), tmp_path / "out", to="npy", call="Nothing.*")
    assert not (tmp_path / "out").exists()


def test_unknown_form_is_an_error(run_path: Path, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="cannot export to 'pickle'"):
        export_run(open_run(run_path), tmp_path / "out", to="pickle")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "name",
    [
        "../../etc/passwd",
        "a/b\\c:d*e?",
        "con.forward",
        ".hidden",
        "-rf",
        "名字.0.forward",
        "x" * 500,
        "a\0b",
        "a\nb",
        "",
    ],
)
def test_hostile_names_become_safe_and_stay_apart(name: str) -> None:
    taken: dict[str, int] = {}
    first, again = safe_file_name(name, ".npy", taken), safe_file_name(name, ".npy", taken)
    assert first != again
    for chosen in (first, again):
        assert len(chosen) <= MAX_FILE_NAME
        assert chosen.isascii()
        assert chosen.isprintable()
        assert not set(chosen) & set('/\\:*?"<>| ')
        assert chosen[0] not in ".-" or name == ""
        assert chosen.partition(".")[0].lower() != "con"


def test_names_that_differ_in_case_only_get_different_files() -> None:
    taken: dict[str, int] = {}
    assert safe_file_name("Module.A", ".npy", taken) == "Module.A.npy"
    assert safe_file_name("Module.a", ".npy", taken).lower() != "module.a.npy"


def test_many_equal_names_cost_no_more_than_others() -> None:
    taken: dict[str, int] = {}
    assert len({safe_file_name("Module.a", ".npy", taken) for _ in range(20_000)}) == 20_000


def test_hostile_slot_name_stays_in_the_folder(tmp_path: Path) -> None:
    content = Blob()
    line = {"name": "Torch.mm.0.forward", "slots": [slot("../../../x", "uint8", [1], b"\1", content)]}
    write_run(tmp_path / "run", [line], content.content)
    export_run(open_run(tmp_path / "run"), tmp_path / "out", to="npy")
    (written,) = (path for path in (tmp_path / "out").rglob("*") if path.is_file())
    assert written.parent == tmp_path / "out/step0/rank0"
