"""A bad file costs seconds and megabytes: every command ends with a clear answer within 10 s and 1 GB, and never with a traceback."""

from __future__ import annotations

import gzip
import json
import os
import resource
import shutil
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from tensorprobe import compare
from tensorprobe.engine.output import read_result as open_result
from tensorprobe.errors import SettingsError, did_you_mean, nearest
from tensorprobe.view.rows import TableView
from tests.attacks import costs
from tests.builders import checker, ptdbg, ranks, runs

pytestmark = pytest.mark.process
X = np.ones((4, 4), np.float32)
MB, GB = 1 << 20, 1 << 30
HEAD = '{"task":"statistics","level":"L1","framework":"pytorch","dump_data_dir":"x","data":{'
Command = tuple[object, ...]


def mm(name: str = "Torch.mm.0.forward", **more: Any) -> runs.Call:
    arguments = {"args": [{"slot": "input.0"}, {"slot": "input.1"}], **more}
    return runs.call(name, inputs=[X, X], outputs=[X @ X], **arguments)


def put(path: Path, kind: str) -> Path:
    """Put something that is no file in place of a file."""
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as held, open_folder(path.parent) as folder:
            held.bind(f"/proc/self/fd/{folder}/{path.name}")  # a path of its own may be too long
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to({"device": "/dev/zero", "loop": path.name}[kind])
    return path


class open_folder:
    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_RDONLY)

    def __enter__(self) -> int:
        return self._fd

    def __exit__(self, *error: object) -> None:
        os.close(self._fd)


def sparse(path: Path, start: bytes = b"{", size: int = 8 * GB) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(start)
    os.truncate(path, size)
    return path


def msprobe(root: Path, text: str) -> Path:
    folder = root / "dump" / "step0" / "rank0"
    folder.mkdir(parents=True)
    (folder / "dump.json").write_text(text)
    return root / "dump"


def entry(name: str, shape: list[int] | None = None) -> str:
    tensor = {"type": "torch.Tensor", "dtype": "torch.float32", "shape": shape or [2], "Max": 1, "Min": 0, "Mean": 0}
    tensor |= {"Norm": 1, "requires_grad": False}
    return f"{json.dumps(name)}: {json.dumps({'input_args': [tensor, tensor], 'input_kwargs': {}, 'output': [tensor]})}"


def unterminated_string(root: Path) -> Iterator[Command]:
    yield "inspect", msprobe(root, HEAD + '"NaN' + 'a\\"NaN' * (MB // 6))


def unterminated_string_of_a_checker(root: Path) -> Iterator[Command]:
    checker.write_dump(root / "dump", '{"Functional*relu*0": NaN "' + '\\"' * (MB // 2))
    yield "inspect", root / "dump"


def names_of_a_megabyte(root: Path) -> Iterator[Command]:
    names = ["Functional." + "a.0." * (MB // 4) + "0.forward", "Module." + "." * 400_000 + "Linear.forward.0"]
    names += ["Module." + ".parameters_grad" * 60_000]
    yield "inspect", msprobe(root, HEAD + ",".join(map(entry, names)) + "}}")
    for number, name in enumerate(
        ["Torch_" + "x_0_forward_input.a" * 50_000 + ".", "Torch_" + "0_" * 400_000 + "forward_input.0"]
    ):
        line = ptdbg.Line([name, 1, [], "torch.float32", [4], [1, 1, 1]])
        ptdbg.write_rank(root / f"dump{number}_v1.0" / "rank0", [line])
        yield "inspect", root / f"dump{number}_v1.0"


def module_path_of_dots(root: Path) -> Iterator[Command]:
    runs.write(root / "a", [mm(module="." * 400_000), mm("Torch.mm.1.forward")])
    runs.write(root / "b", [mm(module="x" + "." * 400_000), mm("Torch.mm.1.forward")])
    yield "compare", root / "a", root / "b"


def frames_that_backtrack(root: Path) -> Iterator[Command]:
    dump = msprobe(root, HEAD + entry("Functional.relu.0.forward") + "}}")
    frames = ["File " + ", line 1, in " * 60_000, "File a, line 1, in " + ", " * 400_000]
    (dump / "step0" / "rank0" / "stack.json").write_text(json.dumps({"0": [["Functional.relu.0.forward"], frames]}))
    yield "inspect", dump, "Functional.relu.0"


def nesting(root: Path) -> Iterator[Command]:
    yield "inspect", msprobe(root, HEAD + '"a":' + "[" * MB)


def sparse_files(root: Path) -> Iterator[Command]:
    sparse(root / "msprobe" / "step0" / "rank0" / "dump.json", HEAD.encode())
    yield "inspect", root / "msprobe"
    sparse(root / "checker" / "forward_info_7.json")
    yield "inspect", root / "checker"
    for name in ("manifest.json", "rank0.json", "step0/rank0/calls.jsonl"):
        runs.write(root / name, [mm()])
        os.truncate(root / name / name, 8 * GB)
        yield "inspect", root / name
    sparse(root / "watch" / "overflow.rank0.json")
    yield "overflow", root / "watch"
    sparse(root / "shards" / "shard-1-of-1.json")
    yield "merge", root / "shards"


def a_declared_shape_of_gigabytes(root: Path) -> Iterator[Command]:
    dump = msprobe(root, HEAD + entry("Torch.mm.0.forward", [1 << 15, 1 << 15]) + "}}")
    yield "precheck", dump
    yield "overflow", dump


def arguments_that_ask_for_gigabytes(root: Path) -> Iterator[Command]:
    one = np.ones(1, np.float32)
    infinite = np.full(1, np.inf, np.float32)
    calls = [
        runs.call("Torch.zeros.0.forward", outputs=[one], args=[[60_000, 60_000]]),
        runs.call("Torch.full.0.forward", outputs=[infinite], args=[[30_000, 30_000], 1.0]),
        runs.call("Tensor.repeat.0.forward", inputs=[X], outputs=[X], args=[{"slot": "input.0"}, 1 << 16, 1 << 10]),
        runs.call("Torch.arange.0.forward", outputs=[one], args=[1 << 50]),
        mm(),
    ]
    runs.write(root / "a", calls)
    yield "precheck", root / "a"
    yield "overflow", root / "a"


def a_shard_of_a_billion(root: Path) -> Iterator[Command]:
    (root / "shards").mkdir()
    (root / "shards" / "shard-1-of-999999999.json").write_text("{}")
    yield "merge", root / "shards"
    runs.write(root / "a", [mm()])
    yield "compare", root / "a", root / "a", "-o", root / "out", "--shard", "1/999999999"


def thousands_of_empty_segments(root: Path) -> Iterator[Command]:
    runs.write(root / "a", {(step, 0): [] for step in range(1000)})
    yield "inspect", root / "a"
    yield "compare", root / "a", root / "a"


def a_step_list_of_a_million(root: Path) -> Iterator[Command]:
    runs.write(root / "a", [mm()])
    runs.write_rank(root / "a", steps=list(range(10**6)))
    runs.write_manifest(root / "a", world_size=10**18)
    yield "inspect", root / "a"


def a_key_of_thousands_of_parts(root: Path) -> Iterator[Command]:
    good = runs.write(root / "a", [mm()])
    for number, text in enumerate(
        (
            "a." * 50_000 + "a = 1",
            "\n".join("b." * 1000 + f"k{n} = 1" for n in range(100)),
            "[a" + ".a" * 50_000 + "]",
            " " * 20 * MB,
        )
    ):
        (root / f"{number}.toml").write_text(text)
        yield "compare", good, good, "--policy", root / f"{number}.toml"


def thousands_of_equal_names(root: Path) -> Iterator[Command]:
    one = np.ones(1, np.float32)
    runs.write(
        root / "a", [runs.call("Torch.exp.0.forward", inputs=[one], outputs=[one], args=[{"slot": "input.0"}])] * 10_000
    )
    yield "export", root / "a", "--to", "safetensors", "-o", root / "file"
    yield "export", root / "a", "--to", "npy", "-o", root / "files"


def one_call_with_thousands_of_tensors(root: Path) -> Iterator[Command]:
    one = np.ones((2, 2), np.float32)
    tree = [[{"slot": f"input.0.{number}"} for number in range(20_000)]]
    call = runs.call(
        "Torch.cat.0.forward", inputs=[one] * 20_000, outputs=[np.ones((40_000, 2), np.float32)], args=tree
    )
    runs.write(root / "a", [call])
    yield "precheck", root / "a", "--jobs", "0"
    yield "audit", root / "a", "--jobs", "0"


def tensors_that_overlap(root: Path) -> Iterator[Command]:
    sparse(
        runs.write_run(
            root / "a",
            [
                {
                    "name": f"Torch.exp.{number}.forward",
                    "slots": [
                        {
                            "name": "input.0",
                            "dtype": "uint8",
                            "shape": [GB - 64 * number],
                            "nbytes": GB - 64 * number,
                            "offset": 64 * number,
                            "digest": "0" * 32,
                        }
                    ],
                }
                for number in range(1000)
            ],
            b"",
        )
        / "tensors.bin",
        b"",
        GB,
    )
    yield "inspect", root / "a", "--verify"


def a_large_tensor_in_a_file_of_holes(root: Path) -> Iterator[Command]:
    """The pages of both files count as memory, too: 512 MB. Whoever widens a side as a whole needs another 1 GB."""
    for name, first in (("a", b"\x01\x02"), ("b", b"\x02\x03")):
        slot = {"name": "output.0", "dtype": "bfloat16", "shape": [GB // 8], "nbytes": GB // 4, "offset": 0}
        folder = runs.write_run(root / name, [{"name": "Torch.exp.0.forward", "slots": [slot]}], b"")
        sparse(folder / "tensors.bin", first, GB // 4)
    yield "diff", root / "a", root / "b", "Torch.exp.0.forward"
    yield "compare", root / "a", root / "b"
    yield "inspect", root / "a", "Torch.exp.0"
    yield "export", root / "a", "--to", "npy", "-o", root / "out"


def a_tensor_without_elements_of_any_size(root: Path) -> Iterator[Command]:
    slot = {"name": "input.0", "dtype": "float32", "shape": [0, 1 << 62, 1 << 40], "nbytes": 0, "offset": 0}
    runs.write_run(root / "a", [{"name": "Torch.exp.0.forward", "slots": [slot], "args": [{"slot": "input.0"}]}], b"")
    yield "inspect", root / "a", "Torch.exp.0"
    yield "export", root / "a", "--to", "npy", "-o", root / "out"
    yield "compare", root / "a", root / "a"


def numbers_beyond_all_limits(root: Path) -> Iterator[Command]:
    good = runs.write(root / "a", [mm()])
    yield "compare", good, good, "--steps", "9" * 100_000
    yield "compare", good, good, "--ranks", ",".join(f"{n}0000000-{n}9999999" for n in range(1, 100))
    yield "precheck", good, "--max-replay-bytes", "9" * 30 + "G"
    yield "precheck", good, "--time-limit", "1e308"


def a_replay_that_hangs(root: Path) -> Iterator[Command]:
    """The order of a product of many matrices takes time in proportion to the cube of their number."""
    arguments = [[{"slot": "input.0"}] * 5000]
    for name, result in (("a", X), ("b", X * np.inf)):
        chain = runs.call("Torch.linalg.multi_dot.0.forward", inputs=[X], outputs=[result], args=arguments)
        runs.write(root / name, [chain])
    yield "overflow", root / "b"
    yield "compare", root / "a", root / "b"
    yield "audit", root / "a"


def hundreds_of_replays_that_hang(root: Path) -> Iterator[Command]:
    """Besides those of one op, each of another op hangs as well: with what is lost of both, precheck and audit end."""
    calls = []
    for number in range(200):
        hanging = {"inputs": [X], "outputs": [X], "args": [[{"slot": "input.0"}] * (5000 + number)]}
        calls.append(runs.call(f"Torch.linalg.multi_dot.{number}.forward", **hanging))
        calls.append(runs.call(f"Torch.chain_matmul.{number}.forward", **{**hanging, "args": hanging["args"][0]}))
    runs.write(root / "a", [*calls, mm()])
    yield "precheck", root / "a", "--device", "cpu"
    yield "audit", root / "a"


def replays_that_need_gigabytes_in_between(root: Path) -> Iterator[Command]:
    """The tensors that come in and go out are small; of which elements to combine is decided by a mask of 10^9."""
    ten, rows = np.arange(10, dtype=np.float32), np.ones((10, 9), np.float32)
    call = runs.call("Torch.combinations.0.forward", inputs=[ten], outputs=[rows], args=[{"slot": "input.0"}, 9])
    runs.write(root / "a", [call, mm()])
    yield "precheck", root / "a"
    yield "audit", root / "a"


def a_sealed_run_that_unpacks_to_gigabytes(root: Path) -> Iterator[Command]:
    (root / "x.tpz").write_bytes(gzip.compress(b'{"format":"tensorprobe-sealed"' + b" " * (GB // 2 - 100) + b"}", 1))
    yield "inspect", root / "x.tpz"


CASES: dict[str, Callable[[Path], Iterator[Command]]] = {
    case.__name__: case
    for case in (
        unterminated_string,
        unterminated_string_of_a_checker,
        names_of_a_megabyte,
        module_path_of_dots,
        frames_that_backtrack,
        nesting,
        sparse_files,
        a_declared_shape_of_gigabytes,
        arguments_that_ask_for_gigabytes,
        a_shard_of_a_billion,
        thousands_of_empty_segments,
        a_step_list_of_a_million,
        a_key_of_thousands_of_parts,
        thousands_of_equal_names,
        one_call_with_thousands_of_tensors,
        tensors_that_overlap,
        a_large_tensor_in_a_file_of_holes,
        a_tensor_without_elements_of_any_size,
        numbers_beyond_all_limits,
        a_replay_that_hangs,
        hundreds_of_replays_that_hang,
        replays_that_need_gigabytes_in_between,
        a_sealed_run_that_unpacks_to_gigabytes,
    )
}


def assert_cheap(command: Command, *codes: int) -> costs.Cost:
    cost = costs.run(*command)
    assert not cost.problems(*codes), (command, cost.problems(*codes), cost.out[-1000:], cost.err[-1000:])
    return cost


@pytest.mark.parametrize("case", CASES)
def test_a_bad_file_costs_seconds_and_megabytes(case: str, tmp_path: Path) -> None:
    for command in CASES[case](tmp_path):
        assert_cheap(command, 0, 1, 2)


KINDS = ("pipe", "socket", "folder", "device", "loop")


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_file_is_not_read(kind: str, tmp_path: Path) -> None:
    good = runs.write(tmp_path / "good", [mm()])
    for folder in ("watch", "shards", "journal", "rules"):
        (tmp_path / folder).mkdir()
    put(tmp_path / "watch" / "overflow.rank0.json", kind)
    put(tmp_path / "shards" / "shard-1-of-1.json", kind)
    put(tmp_path / "journal" / "checks.jsonl", kind)
    rules = put(tmp_path / "rules" / "policy.toml", kind)
    dump = msprobe(tmp_path, "")
    put(dump / "step0" / "rank0" / "dump.json", kind)
    for command in (
        ("overflow", tmp_path / "watch"),
        ("merge", tmp_path / "shards"),
        ("precheck", good, "--resume", tmp_path / "journal"),
        ("compare", good, good, "--policy", rules),
        ("compare", good, good, "--map", rules),
        ("inspect", rules),
        ("inspect", dump),
    ):
        assert_cheap(command, 2)


def test_a_replay_with_huge_numbers_is_one_call(tmp_path: Path) -> None:
    infinite = np.full((4, 4), np.inf, np.float32)
    power = {"inputs": [X], "outputs": [infinite], "args": [{"slot": "input.0"}, 1 << 62]}
    runs.write(tmp_path / "a", [runs.call("Torch.matrix_power.0.forward", **power), mm()])
    cost = assert_cheap(("precheck", tmp_path / "a", "--time-limit", "3"), 0, 1)
    assert "passed    2" in cost.out
    assert_cheap(("overflow", tmp_path / "a"), 0, 1)


def test_any_flipped_byte_of_a_table_is_one_clear_error(tmp_path: Path) -> None:
    ranks.write_pair(tmp_path)
    shards = tmp_path / "shards"
    command = ("compare", tmp_path / "baseline", tmp_path / "candidate", "-o", shards, "--shard", "1/1")
    assert costs.run(*command).code in (0, 1)
    table = next(shards.glob("*rank0.parquet"))
    raw = table.read_bytes()
    for at in range(7, len(raw), len(raw) // 8):
        copy = tmp_path / f"flipped{at}"
        shutil.copytree(shards, copy)
        (copy / table.name).write_bytes(raw[:at] + bytes([raw[at] ^ 0xFF]) + raw[at + 1 :])
        assert_cheap(("merge", copy), 0, 1, 2)


def test_a_table_without_values_is_one_clear_error(tmp_path: Path) -> None:
    a, b = ranks.write_pair(tmp_path)
    result = tmp_path / "result"
    compare(a, b, out=result)
    whole = parquet.read_table(result / "result.parquet")
    page = tmp_path / "page.html"
    for at, name in enumerate(whole.column_names):
        parquet.write_table(whole.set_column(at, name, pyarrow.nulls(len(whole))), result / "result.parquet")
        with pytest.raises(SettingsError, match=f"'{name}' has no value in {len(whole)} rows"):
            open_result(result).rows.table()
        with pytest.raises(SettingsError, match="has no value in"):
            TableView(result / "result.parquet").column(name)
    assert_cheap(("report", result, "-o", page), 2)
    assert not page.exists()


LIMITED = (
    "import resource, sys; sys.dont_write_bytecode = True; "
    "resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv.pop(1)), -1)); "
    "from tensorprobe.cli.main import main; main()"
)


@pytest.mark.parametrize("limit", [0, 300])
@pytest.mark.parametrize(
    "what", ["compare", "csv", "xlsx", "shard", "merge", "precheck", "export", "npy", "format", "sheet"]
)
def test_a_full_disk_is_one_clear_error(what: str, limit: int, tmp_path: Path) -> None:
    assert resource.RLIMIT_FSIZE is not None
    a, b = ranks.write_pair(tmp_path)
    out = tmp_path / "out"
    if what == "merge":
        if limit != 300:
            pytest.skip("one limit is enough for a command that needs another before it")
        assert costs.run("compare", a, b, "-o", out, "--shard", "1/1").code in (0, 1)
    before = sorted(path.name for path in out.iterdir()) if out.exists() else []
    command: dict[str, Command] = {
        "compare": ("compare", a, b, "-o", out),
        "csv": ("compare", a, b, "-o", out, "--format", "csv"),
        "xlsx": ("compare", a, b, "-o", out, "--format", "xlsx"),
        "shard": ("compare", a, b, "-o", out, "--shard", "1/1"),
        "merge": ("merge", out),
        "precheck": ("precheck", a, "-o", out, "--jobs", "0"),
        "export": ("export", a, "--to", "safetensors", "-o", out),
        "npy": ("export", a, "--to", "npy", "-o", out),
        "format": ("compare", a, b, "--format", f"json={tmp_path / 'result.json'}"),
        "sheet": ("compare", a, b, "--format", f"xlsx={tmp_path / 'result.xlsx'}"),
    }
    scratch = tmp_path / "tmp"
    scratch.mkdir()
    environment = {**os.environ, "TMPDIR": str(scratch)}
    cost = costs.run_program([sys.executable, "-c", LIMITED, str(limit), *map(str, command[what])], env=environment)
    assert not cost.problems(2), (cost.problems(2), cost.out[-500:], cost.err[-1500:])
    assert "File too large" in cost.err
    after = sorted(path.name for path in out.iterdir()) if out.exists() else []
    if what in ("compare", "csv", "xlsx", "shard", "merge"):
        assert after == before
    assert not list(scratch.iterdir())
    assert not list(tmp_path.glob("result.*")) and not list(tmp_path.glob(".*"))
    assert not [
        path for path in out.rglob("*") if path.suffix in (".npy", ".safetensors") and path.stat().st_size <= limit
    ]


@pytest.mark.parametrize("place", ["/proc/tensorprobe", "/dev/null/out"])
def test_an_output_folder_that_cannot_be_made_is_one_clear_error(place: str, tmp_path: Path) -> None:
    good = runs.write(tmp_path / "good", [mm()])
    for command in (
        ("compare", good, good, "-o", place),
        ("precheck", good, "-o", place),
        ("export", good, "--to", "npy", "-o", place),
        ("compare", good, good, "--format", f"csv={place}"),
    ):
        assert_cheap(command, 2)


HOSTILE = "a\x1b[31m\n::error::x\u202e\x9b=1+1\udcff"


def test_names_of_files_and_folders_are_made_harmless(tmp_path: Path) -> None:
    folder = tmp_path / HOSTILE
    good = runs.write(folder / "good", [mm()])
    other = runs.write(folder / "other", [mm("Torch.mm.0.forward", module="m"), mm("Torch.mm.1.forward")])
    out = folder / "out"
    for command in (
        ("inspect", good),
        ("inspect", good, "Torch.mm.0"),
        ("inspect", good, "--verify"),
        ("inspect", folder / "none"),
        ("inspect", folder),
        ("overflow", good),
        ("precheck", good, "-o", folder / "checked"),
        ("compare", good, other, "-o", out),
        ("compare", good, other, "--format", "md"),
        ("compare", good, other, "--format", "junit"),
        ("compare", good, other, "--format", "github"),
        ("compare", good, other, "--json"),
        ("export", good, "--to", "npy", "-o", folder / "files"),
        ("compare", good, folder / "none"),
        ("merge", out),
        ("compare", good, good, "--map", folder / "none"),
        ("compare", good, good, "--policy", folder / "none.toml"),
    ):
        cost = assert_cheap(command, 0, 1, 2)
        assert not any(line.startswith("::error::x") for line in (cost.out + cost.err).splitlines())


def test_nearest_names_cost_nothing_for_long_and_many_names() -> None:
    assert nearest("Torch." + "ab" * 30_000, ["Torch." + "ba" * 30_000] * 100) == []
    assert did_you_mean("x" * 150, (f"{number}" + "y" * 150 for number in range(10**6))) == ""
