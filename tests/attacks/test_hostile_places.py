"""Files that change while they are read, outputs that are no files, paths that are not Unicode: one answer, nothing else touched."""

from __future__ import annotations

import os
import stat
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from msprobe.pytorch import PrecisionDebugger
from tensorprobe.cli.results import open_result
from tensorprobe.errors import TensorprobeError
from tensorprobe.files import Replacement
from tensorprobe.legacy.msprobe.cli_checks import read_lists
from tensorprobe.legacy.msprobe.compare import read_settings
from tensorprobe.legacy.ptdbg.acl import read_dump_config
from tensorprobe.pairing.mapping import read_map_text
from tensorprobe.sim.faults import read_faults
from tensorprobe.watches.overflow.result import merge_watches
from tests.attacks import costs
from tests.builders import checker, ranks, runs

pytestmark = pytest.mark.process
X = np.ones((64, 64), np.float32)


def relu(name: str = "Functional.relu.0.forward", **more: Any) -> runs.Call:
    return runs.call(name, **{"inputs": [X], "outputs": [X], "args": [{"slot": "input.0"}], **more})


CUTTING = """
import os, sys
from tensorprobe.record.blob import Blob

checked = Blob._mapping

def cut(self, end):
    found = checked(self, end)
    if "victim" in str(self._root):
        os.truncate(self._root.joinpath(*self._parts), 0)  # as another process may do, after every check
        Blob._mapping = lambda self, end: self._pool.get(self._parts, self._map)
    return found

Blob._mapping = cut
from tensorprobe.cli.main import main
main()
"""


@pytest.mark.parametrize(
    "command",
    [
        ("compare", "good", "victim", "-o", "out", "--prove", "off"),
        ("compare", "victim", "good", "--prove", "off"),
        ("inspect", "victim", "Functional.relu.0"),
        ("inspect", "victim", "--verify"),
        ("export", "victim", "--to", "npy", "-o", "out"),
        ("export", "victim", "--to", "safetensors", "-o", "out"),
        ("audit", "victim", "--jobs", "0"),
    ],
    ids=lambda command: "-".join(word for word in command[:4] if word[0] != "-"),
)
def test_a_file_that_is_cut_short_while_it_is_read_is_one_clear_error(command: tuple[str, ...], tmp_path: Path) -> None:
    for name in ("good", "victim"):
        runs.write(tmp_path / name, [relu(inputs=[X * (name == "good")])])
    words = [sys.executable, "-c", CUTTING, *command]
    cost = costs.run_program(words, cwd=tmp_path)
    assert not cost.problems(2), (cost.problems(2), cost)
    assert not any(path.is_file() for path in (tmp_path / "out").rglob("*"))


def test_a_pipe_or_device_as_output_is_written_to_and_stays(tmp_path: Path) -> None:
    good, other = ranks.write_pair(tmp_path)
    for form in ("csv", "json", "md", "junit", "github", "xlsx"):
        pipe = tmp_path / f"pipe.{form}"
        os.mkfifo(pipe)
        read: list[bytes] = []
        reader = threading.Thread(target=lambda path=pipe, into=read: into.append(path.read_bytes()))
        reader.start()
        cost = costs.run("compare", good, other, "--format", f"{form}={pipe}")
        reader.join(60)
        assert cost.code == 1, cost
        assert stat.S_ISFIFO(pipe.stat().st_mode)
        assert len(read[0]) > 100
    assert not list(tmp_path.glob(".*"))


def test_a_replacement_leaves_the_old_file_when_its_block_raises(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_text("old")
    with pytest.raises(ZeroDivisionError), Replacement(path) as unfinished:
        unfinished.write_text("half")
        raise ZeroDivisionError
    assert path.read_text() == "old"
    with Replacement(path) as unfinished:
        unfinished.write_text("new")
    assert path.read_text() == "new"
    with pytest.raises(IsADirectoryError):
        Replacement(tmp_path)
    assert [each.name for each in tmp_path.iterdir()] == ["x"]


def test_a_path_that_is_not_unicode_is_a_path(tmp_path: Path) -> None:
    good = runs.write(tmp_path / "good", [relu()])
    odd = runs.write(Path(os.fsdecode(os.fsencode(tmp_path) + b"/r\xff\xfe")), {(0, rank): [relu()] for rank in (0, 1)})
    broken = [relu(outputs=[X + 1]), relu("Functional.relu.1.forward", outputs=[X * np.float32(np.inf)])]
    wrong = runs.write(Path(os.fsdecode(os.fsencode(tmp_path) + b"/w\xff")), {(0, rank): broken for rank in (0, 1)})
    for command, code in (
        (("inspect", odd), 0),
        (("inspect", odd, "--json"), 0),
        (("export", odd, "--to", "npy", "-o", tmp_path / "files"), 0),
        (("compare", good, odd), 0),
        (("compare", wrong, odd, "--jobs", "2"), 1),
        (("precheck", odd, "-o", Path(f"{odd}-out"), "--jobs", "2"), 0),
        (("audit", wrong, "--save-failures", "-o", Path(f"{wrong}-out")), 1),
        (("overflow", wrong), 1),
    ):
        cost = costs.run(*command)
        assert not cost.problems(code), (command, cost.problems(code), cost.out[-500:], cost.err[-1500:])


HOSTILE = "a\x1b[31m\n::error::x\u202e\x9b"


@pytest.mark.parametrize("program", ["run_ut", "run_ut.run_overflow_check"])
def test_programs_of_the_older_tools_print_paths_and_names_plainly(program: str, tmp_path: Path) -> None:
    folder = tmp_path / HOSTILE
    name = f"Functional*relu{HOSTILE}*0"
    checker.write_dump(
        folder,
        {
            name: {"args": [checker.tensor()], "kwargs": {}},
            "Functional*relu*0": {"args": [checker.tensor()], "kwargs": {}},
        },
    )
    (forward,) = folder.glob("forward_info_*.json")
    (tmp_path / "forward_info_9.json").symlink_to("/proc/self/mem")
    for path in (forward, folder / "none.json", tmp_path / "forward_info_9.json", Path("/dev/zero")):
        words = [sys.executable, "-m", f"api_accuracy_checker.{program}", "-forward", str(path)]
        words += ["-backward", str(path), "-o", str(tmp_path / "out")] if program == "run_ut" else []
        cost = costs.run_program(words, cwd=tmp_path)
        assert not cost.problems(0, 1, 2), (path, cost.problems(0, 1, 2), cost)
        assert not any(line.startswith("::error") for line in (cost.out + cost.err).splitlines())
        assert cost.code == 2 or path == forward


def test_an_array_given_to_the_older_tool_is_not_read_whole(tmp_path: Path) -> None:
    path = tmp_path / "x.npy"
    np.save(path, np.zeros((0, 1), np.float32))
    raw = path.read_bytes()
    path.write_bytes(raw.replace(b"(0, 1), }        ", b"(402653184, 1), }"))
    os.truncate(path, len(raw) + (1536 << 20))
    code = "import sys, ptdbg_ascend as old; old.set_backward_input([sys.argv[1]])"
    cost = costs.run_program([sys.executable, "-c", code, str(path)], cwd=tmp_path)
    assert cost.code == 0 and cost.peak_bytes < costs.MOST_BYTES, cost


NO_JSON = {
    "no UTF-8": b'{"a": "\xe9\xff"}',
    "deep": b"[" * 200_000,
    "deep value": b'{"checks": ' + b"[" * 5000 + b"]" * 5000 + b"}",
    "huge number": b'{"task": ' + b"9" * 10_000 + b"}",
    "half": b'{"task": "tensor", ',
    "list": b"[1, 2]",
    "nothing": b"",
}


@pytest.mark.parametrize("kind", NO_JSON)
def test_json_that_is_none_is_an_error_of_ours_at_every_door(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    for name in ("x.json", "overflow.rank0.json", "summary.json"):
        (tmp_path / name).write_bytes(NO_JSON[kind])
    doors: dict[str, Any] = {
        "config": lambda: PrecisionDebugger(config_path=str(path), dump_path=str(tmp_path / "dump")),
        "lists": lambda: read_lists(path),
        "compare": lambda: read_settings(path),
        "acl": lambda: read_dump_config(path),
        "map": lambda: read_map_text(path),
        "faults": lambda: read_faults(str(path)),
        "watch": lambda: merge_watches(tmp_path),
        "result": lambda: open_result(tmp_path),
    }
    for door, enter in doors.items():
        try:
            enter()
        except TensorprobeError:
            continue
        # The lists are not read beyond the keys that they need; a map without lines is a map.
        assert door == "lists" or (door, kind) == ("map", "nothing")


BLOCKS = "x\x1b[31m\n::error::x\u202e\x9b\u2066"


@pytest.mark.parametrize("encoding", ["utf-8", "ascii", "latin-1"])
def test_what_was_mistyped_is_repeated_plainly(encoding: str, tmp_path: Path) -> None:
    """The parsers of options print their errors themselves."""
    good = runs.write(tmp_path / "good", [relu()])
    environment = {**os.environ, "PYTHONIOENCODING": encoding}
    words: list[list[str]] = [
        [f"-{BLOCKS}"],
        [BLOCKS],
        ["compare", "a", "b", f"--{BLOCKS}"],
        ["inspect", "a", "b", BLOCKS, BLOCKS],
    ]
    words += [["compare", "a", "b", f"--limit={BLOCKS}"], ["config", BLOCKS], ["compare", "a", "b", "--steps", BLOCKS]]
    for command in words:
        cost = costs.run(*command, env=environment)
        assert not cost.problems(2), (command, cost.problems(2), cost)
    for program in ("api_accuracy_checker.run_ut", "api_accuracy_checker.run_ut.run_overflow_check", "msprobe"):
        for command in ([BLOCKS], [f"--{BLOCKS}"], ["-f", BLOCKS]):
            cost = costs.run_program([sys.executable, "-m", program, *command], env=environment)
            assert set(cost.problems(2)) <= {"exit code 2 without an error"}, (program, command, cost)  # usage: …
    cost = costs.run("compare", good, good, env=environment)
    assert not cost.problems(0) and cost.out.startswith("AGREES"), cost
    broken = runs.write(tmp_path / "broken", [relu(outputs=[X + 1])])
    cost = costs.run("compare", good, broken, env=environment)
    assert not cost.problems(1) and "max |" in cost.out, cost  # with a sign that not every encoding has


def test_only_the_end_of_a_log_is_read(tmp_path: Path) -> None:
    grow = "import os, sys; os.truncate(1, 4 << 30); sys.exit(3)"
    command = [sys.executable, "-c", grow, "--vs", sys.executable, "-c", grow]
    cost = costs.run("find", "-o", tmp_path / "found", "--", *command)
    assert set(cost.problems(2)) <= {"exit code 2 without an error"}, (cost.problems(2), cost)  # after the plan
    assert "CommandFailed: " in cost.err and "recorded nothing" in cost.err and len(cost.err) < 5000
