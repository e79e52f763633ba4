"""Readers that other packages add: by entry point, by registration, as docs/readers.md shows them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import tensorprobe
from tensorprobe import registry
from tensorprobe.errors import RunError, RunNotFound, TensorDamaged
from tensorprobe.record import foreign, register_reader
from tensorprobe.record.overview import describe_run

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "readers.md").read_text(encoding="utf-8")
VALUES = np.arange(6, dtype=np.float32)


def blocks(kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)


@pytest.fixture
def reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The page's reader, importable; whatever a test registers is forgotten again."""
    folder = tmp_path / "site"
    folder.mkdir()
    (folder / "mytool_reader.py").write_text(blocks("python")[0])
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setattr(foreign, "READERS", dict(registry.READERS))
    monkeypatch.setattr(registry, "READERS", foreign.READERS)
    foreign._installed_readers.cache_clear()
    yield folder
    foreign._installed_readers.cache_clear()
    sys.modules.pop("mytool_reader", None)


def install(folder: Path, module: str = "mytool_reader") -> None:
    """What pip leaves behind of a distribution with the page's entry point."""
    written = folder / "mytool_reader-1.0.dist-info"
    written.mkdir()
    (written / "METADATA").write_text("Metadata-Version: 2.1\nName: mytool-reader\nVersion: 1.0\n")
    assert "mytool_reader:open_dump" in blocks("toml")[0]
    text = blocks("toml")[0].replace("[project.entry-points.tensorprobe_readers]", "[tensorprobe_readers]")
    (written / "entry_points.txt").write_text(text.replace('"', "").replace("mytool_reader", module))


def write_dump(folder: Path, values: np.ndarray = VALUES) -> Path:
    folder.mkdir()
    (folder / "add.raw").write_bytes(values.tobytes())
    (folder / "ops.json").write_text(
        json.dumps([{"name": "add", "number": 0, "shape": [2, 3], "count": 6, "file": "add.raw"}])
    )
    return folder


def test_a_reader_joins_by_entry_point(reader: Path, tmp_path: Path) -> None:
    dump = write_dump(tmp_path / "dump")
    with pytest.raises(RunNotFound, match=r"no run in .*\n  It holds add\.raw, ops\.json"):
        tensorprobe.open_run(dump)
    install(reader)
    foreign._installed_readers.cache_clear()
    run = tensorprobe.open_run(dump)
    assert (run.manifest.tool, run.closed, run.steps, run.ranks) == ("mytool", True, [0], [0])
    (call,) = run.calls()
    assert call.name == "Torch.add.0.forward"
    assert call.outputs[0].numpy().tolist() == VALUES.reshape(2, 3).tolist()
    assert call.outputs[0].tensor().tolist() == VALUES.reshape(2, 3).tolist()
    assert run.call("Torch.add").model == call.model


def test_its_runs_are_compared(reader: Path, tmp_path: Path) -> None:
    install(reader)
    baseline, candidate = write_dump(tmp_path / "a"), write_dump(tmp_path / "b", VALUES + 1)
    assert tensorprobe.compare(baseline, write_dump(tmp_path / "c")).exit_code == 0
    result = tensorprobe.compare(baseline, candidate)
    assert result.exit_code == 1


def test_a_reader_joins_by_name_and_is_named_in_errors(reader: Path, tmp_path: Path) -> None:
    exec(blocks("python")[1], {})
    assert tensorprobe.open_run(write_dump(tmp_path / "dump")).manifest.tool == "mytool"
    (tmp_path / "above" / "step0").mkdir(parents=True)
    (tmp_path / "above" / "step0" / "ops.json").write_text("[]")
    with pytest.raises(
        RunNotFound, match=r"looks like a dump of mytool \(.*ops\.json\)\. Pass the folder with ops\.json"
    ):
        tensorprobe.open_run(tmp_path / "above")


def test_a_value_of_the_wrong_size_is_refused(reader: Path, tmp_path: Path) -> None:
    register_reader("mytool", "mytool_reader:open_dump")
    (call,) = tensorprobe.open_run(write_dump(tmp_path / "dump", VALUES[:4])).calls()
    with pytest.raises(TensorDamaged, match=r"it has 16 bytes; float32 \[2, 3\] has 24"):
        call.outputs[0].numpy()


def test_a_missing_value_is_damage_of_that_tensor(reader: Path, tmp_path: Path) -> None:
    register_reader("mytool", "mytool_reader:open_dump")
    dump = write_dump(tmp_path / "dump")
    run = tensorprobe.open_run(dump)
    (call,) = run.calls()
    assert describe_run(run).size_bytes == VALUES.nbytes
    (dump / "add.raw").unlink()
    with pytest.raises(TensorDamaged, match="its reader failed: FileNotFoundError"):
        call.outputs[0].numpy()


def test_a_reader_that_fails_is_named(reader: Path, tmp_path: Path) -> None:
    register_reader("mytool", "mytool_reader:open_dump")
    (tmp_path / "ops.json").write_text('[{"shape": []}]')
    with pytest.raises(
        RunError, match=r"the reader 'mytool' \(mytool_reader:open_dump\) failed at .*: KeyError: 'count'"
    ):
        tensorprobe.open_run(tmp_path)


@pytest.mark.parametrize("where", ["no_such_module:open_dump", "mytool_reader:no_such_function"])
def test_a_broken_reader_is_named(reader: Path, tmp_path: Path, where: str) -> None:
    register_reader("mytool", where)
    with pytest.raises(RunError, match=rf"the reader 'mytool' \({where}\) cannot be loaded"):
        tensorprobe.open_run(write_dump(tmp_path / "dump"))


def test_no_reader_is_imported_for_a_run_of_ours(tmp_path: Path) -> None:
    code = (
        "import sys, torch, tensorprobe\n"
        "with tensorprobe.capture(sys.argv[1]): torch.ones(2) + 1\n"
        "before = {name for name in sys.modules if name.startswith('tensorprobe.legacy')}\n"
        "list(tensorprobe.open_run(sys.argv[1]).calls())\n"
        "after = {name for name in sys.modules if name.startswith('tensorprobe.legacy')}\n"
        "assert after == before, after - before\n"
        "assert 'tensorprobe.legacy.layouts.msprobe_reader' not in after\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "run")], check=True)
