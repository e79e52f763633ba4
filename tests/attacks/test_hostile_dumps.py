"""Broken and hostile dumps of ptdbg_ascend: each gives its own clear error or a readable part, and never a crash or a hang."""

from __future__ import annotations

import json
import os
import pickle
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tensorprobe
from tensorprobe.errors import RunDamaged, SettingsError, TensorDamaged, TensorprobeError
from tensorprobe.legacy.layouts.ptdbg_lines import MAX_FRAMES
from tensorprobe.legacy.msprobe.cli_commands import parse
from tensorprobe.record import open_run
from tensorprobe.record.lines import MAX_DAMAGED, MAX_LINE
from tests.builders import msprobe
from tests.builders.ptdbg import Line, stack, tensor, write_dump, write_rank

NAME = "Torch_mm_0_forward_output"
X = np.arange(16, dtype=np.float32).reshape(4, 4)


class Bomb:
    """Runs a program when it is unpickled."""

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, ("exit 17",)


def good_dump(root: Path) -> Path:
    """A dump of one tensor; the path of its file."""
    write_dump(root, [tensor(NAME, X)])
    return root / "rank0" / "npu_dump" / f"{NAME}.npy"


def test_pickle_is_never_loaded(tmp_path: Path) -> None:
    for protocol in (2, 3, 4, 5):
        pkl = write_rank(tmp_path / str(protocol) / "rank0", [tensor(NAME, X)])
        pkl.write_bytes(pickle.dumps(Bomb(), protocol=protocol))
        for path in (pkl, pkl.parent, pkl.parent.parent):
            with pytest.raises(
                RunDamaged, match="is a binary pickle, not the text that ptdbg_ascend writes; it is never"
            ):
                open_run(path)


def test_pickle_of_an_old_protocol_is_damage(tmp_path: Path) -> None:
    pkl = write_rank(tmp_path, [tensor(NAME, X)])
    pkl.write_bytes(pickle.dumps(Bomb(), protocol=0))
    run = open_run(pkl)
    assert list(run.calls(on_damage="skip")) == []
    assert run.damage(0, 0)


FILES: dict[str, tuple[Callable[[Path], object], str]] = {
    "object array": (lambda file: np.save(file, np.array([Bomb()], dtype=object)), "holds Python objects, which is a pickle"),
    "a pickle": (lambda file: file.write_bytes(pickle.dumps(Bomb())), "not a .npy file"),
    "empty": (lambda file: file.write_bytes(b""), "not a .npy file"),
    "magic alone": (lambda file: file.write_bytes(b"\x93NUMPY\1\0"), "header that numpy does not write"),
    "cut in the header": (lambda file: file.write_bytes(file.read_bytes()[:40]), "header that numpy does not write"),
    "cut in the values": (lambda file: file.write_bytes(file.read_bytes()[:-1]), "has 63 bytes of values; f4 .* has 64"),
    "longer": (lambda file: file.write_bytes(file.read_bytes() + b"0"), "has 65 bytes of values"),
    "another shape": (lambda file: np.save(file, X.reshape(2, 8)), r"holds the shape \[2, 8\], its line says \[4, 4\]"),
    "another dtype": (lambda file: np.save(file, X.astype(int)), "holds i8, which is not how float32 is stored"),
    "structured": (lambda file: np.save(file, np.zeros((4, 4), "f4,f4")), "elements of type .*, which no tensor has"),
    "text": (lambda file: np.save(file, np.full((4, 4), "abc")), "elements of type '<U3'"),
    "void": (lambda file: np.save(file, np.zeros((4, 4), "V4")), r"elements of type '\|V4'"),
    "unknown version": (
        lambda file: file.write_bytes(file.read_bytes().replace(b"NUMPY\1", b"NUMPY\x09", 1)),
        "version 9",
    ),
    "header of 4 GB": (lambda file: file.write_bytes(b"\x93NUMPY\2\0\xff\xff\xff\xff" + b" " * 500), "expected 4294967295 bytes got 500"),
    "header that is a program": (
        lambda file: file.write_bytes(header("__import__('os').system('exit 17')")),
        "header that numpy does not write",
    ),
    "header nested deeply": (lambda file: file.write_bytes(header("(" * 4000)), "header that numpy does not write"),
    "shape of 10 GB": (lambda file: file.write_bytes(header(shape="(2500000000,)") + b"0" * 64), "has 64 bytes of values"),
    "shape that wraps to 64 bytes": (
        lambda file: file.write_bytes(header(shape="(4611686018427387908, 4)") + b"0" * 64),
        "impossible shape",
    ),
    "thousands of dimensions": (
        lambda file: file.write_bytes(header(shape=f"({'1,' * 1000})") + b"0" * 4),
        "impossible shape",
    ),
    "negative shape": (lambda file: file.write_bytes(header(shape="(-4, -4)") + b"0" * 64), "impossible shape"),
}  # fmt: skip


def header(text: str = "", *, shape: str = "(4, 4)") -> bytes:
    raw = (text or f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}").encode()
    raw += b" " * (-(len(raw) + 11) % 64) + b"\n"
    return b"\x93NUMPY\1\0" + len(raw).to_bytes(2, "little") + raw


@pytest.mark.parametrize("attack", FILES)
def test_hostile_file_is_refused_before_its_values_are_used(attack: str, tmp_path: Path) -> None:
    damage, told = FILES[attack]
    file = good_dump(tmp_path / "a_v1.0")
    good_dump(tmp_path / "b_v1.0")
    damage(file)
    (call,) = open_run(tmp_path / "a_v1.0").calls()
    with pytest.raises(TensorDamaged, match=told):
        call.outputs[0].numpy()
    result = tensorprobe.compare(tmp_path / "a_v1.0", tmp_path / "b_v1.0")
    assert result.summary.bases["values"] == 0
    (note,) = result.rows.table()["note"].to_pylist()
    assert note.startswith("damaged: ")


def test_file_that_is_no_file_is_refused(tmp_path: Path) -> None:
    file = good_dump(tmp_path / "a_v1.0")
    outside = tmp_path / "secret.npy"
    np.save(outside, X)
    makers: dict[str, Callable[[], object]] = {
        "a symbolic link": lambda: file.symlink_to(outside),
        "a folder": file.mkdir,
        "a special file": lambda: os.mkfifo(file),
    }
    for told, make in makers.items():
        file.unlink() if not file.is_dir() else file.rmdir()
        make()
        (call,) = open_run(tmp_path / "a_v1.0").calls()
        with pytest.raises(TensorDamaged, match=f"is {told}"):
            call.outputs[0].numpy()


@pytest.mark.parametrize("what", ["rank0", "rank0/npu_dump.pkl", "rank0/npu_dump"])
def test_links_in_a_dump_are_not_followed(what: str, tmp_path: Path) -> None:
    good_dump(tmp_path / "a_v1.0")
    (tmp_path / "a_v1.0" / what).rename(tmp_path / "elsewhere")
    (tmp_path / "a_v1.0" / what).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(RunDamaged, match="is a symbolic link"):
        open_run(tmp_path / "a_v1.0")


@pytest.mark.parametrize(
    "name",
    ["Torch_mm_0_forward_input./etc/passwd", "Torch_mm_0_forward_input.0/a", "/Torch_mm_0_forward_output", "Torch_/../x_0_forward_output"],
)  # fmt: skip
def test_name_never_leaves_the_folder(name: str, tmp_path: Path) -> None:
    fields = [name, 1, [], "torch.float32", [4, 4], [1, 1, 1]]
    run = open_run(write_rank(tmp_path, [Line(fields)]))
    for call in run.calls(on_damage="skip"):
        for slot in call.slots:
            with pytest.raises(TensorDamaged, match="is none that a file in the folder can have"):
                slot.numpy()
    assert len(run.damage(0, 0)) + len(list(run.calls(on_damage="skip"))) == 1


def test_name_that_no_file_system_takes_is_a_fact(tmp_path: Path) -> None:
    name = f"Torch_{'m' * 3000}_0_forward_output"
    (call,) = open_run(write_rank(tmp_path, [Line([name, 1, [], "torch.float32", [1], [1, 1, 1]])])).calls()
    with pytest.raises(TensorDamaged, match="cannot be opened: File name too long"):
        call.outputs[0].numpy()


LINES: dict[str, tuple[bytes, str]] = {
    "zeros": (b"\0" * 100, "not JSON"),
    "not UTF-8": (b'["\xff_mm_0_forward_output", 1, [], "a", [], [1,1,1]]', "not UTF-8"),
    "control characters": (b'["Torch_\\u001b[2J_0_forward_output", 1, [], "a", [], [1,1,1]]', "is not the name of a line"),
    "endless number": (
        b'["Torch_mm_' + b"9" * 5000 + b'_forward_output", 1, [], "a", [], [1,1,1]]',
        "is not the name of a line",
    ),
    "deep nesting": (b"[" * 200_000 + b"]" * 200_000, "nested too deeply"),
    "deep nesting with NaN": (b'["a", NaN, ' + b"[" * 200_000 + b"]" * 200_001, "nested too deeply"),
    "NaN and rubbish": (b'["Torch_mm_0_forward_output", NaN, oops]', "not JSON"),
    "number of 5000 digits": (b'["Torch_mm_0_forward_output", 1, [], "a", [' + b"9" * 5000 + b"], [1,1,1]]", ""),
    "number of 5000 digits and NaN": (
        b'["Torch_mm_0_forward_output", 1, [], "a", [' + b"9" * 5000 + b"], [NaN,1,1]]",
        "",
    ),
    "statistic beyond every float": (
        b'["Torch_mm_0_forward_output", 1, [], "a", [], [' + b"9" * 400 + b",1,NaN]]",
        "three numbers",
    ),
    "thousands of dimensions": (
        json.dumps([NAME, 1, [], "torch.float32", [1] * 5000, [1, 1, 1]]).encode(),
        "5,000 dimensions",
    ),
    "huge dimension": (json.dumps([NAME, 1, [], "torch.float32", [2**63], [1, 1, 1]]).encode(), "impossible"),
    "stack without end": (
        stack("Torch_mm_0_forward", *[["a", "1", "f", "c"]] * (MAX_FRAMES + 1)).raw,
        "at most 1,000 frames",
    ),
}  # fmt: skip


@pytest.mark.parametrize("attack", LINES)
def test_hostile_line_is_damage_and_the_others_are_read(attack: str, tmp_path: Path) -> None:
    raw, told = LINES[attack]
    lines = [tensor("Torch_a_0_forward_output", X), Line(raw), tensor("Torch_b_0_forward_output", X)]
    pkl = tmp_path / "npu_dump.pkl"
    pkl.write_bytes(b"".join(line.raw + b"\n" for line in lines))
    run = open_run(pkl)
    assert [call.index for call in run.calls(on_damage="skip")] == [0, 2]
    (damage,) = run.damage(0, 0)
    assert damage.line == 2
    assert told in damage.reason
    assert len(str(damage)) < 1000


def test_endless_line_is_not_read_to_its_end(tmp_path: Path) -> None:
    pkl = write_rank(tmp_path, [tensor(NAME, X)])
    with pkl.open("r+b") as file:
        file.truncate(1 << 40)
    run = open_run(pkl)
    assert [call.index for call in run.calls(on_damage="skip")] == [0]
    (damage,) = run.damage(0, 0)
    assert (damage.line, f"longer than {MAX_LINE:,} bytes" in damage.reason) == (2, True)


def test_file_of_nothing_but_damage_is_given_up(tmp_path: Path) -> None:
    pkl = tmp_path / "npu_dump.pkl"
    pkl.write_bytes(b"[1]\n" * (5 * MAX_DAMAGED) + tensor(NAME, X).raw + b"\n")
    run = open_run(pkl)
    assert list(run.calls(on_damage="skip")) == []
    assert len(run.damage(0, 0)) == MAX_DAMAGED + 1
    assert f"after {MAX_DAMAGED:,} damaged lines" in run.damage(0, 0)[-1].reason


def test_huge_shape_without_values_costs_nothing(tmp_path: Path) -> None:
    fields = [NAME, 1, [], "torch.float32", [2**40, 2**40], [1.0, 1.0, 1.0]]
    run = open_run(write_rank(tmp_path, [Line(fields)]))
    (call,) = run.calls()
    with pytest.raises(TensorDamaged, match="impossible"):
        call.outputs[0].numpy()
    assert tensorprobe.compare(run, run).summary.bases["values"] == 0


def test_mutated_dumps_never_crash(tmp_path: Path) -> None:
    """Flipped, dropped and doubled bytes, in the text and in the files: an error of ours, damage, or a reading."""
    lines = [
        tensor("Torch_a_0_forward_input.0", X),
        stack("Torch_a_0_forward", ["a.py", "1", "f", "c"]),
        tensor(NAME, X),
    ]
    write_dump(tmp_path / "a_v1.0", lines)
    files = sorted(path for path in (tmp_path / "a_v1.0").rglob("*") if path.is_file())
    originals = {file: file.read_bytes() for file in files}
    dice = random.Random(7)
    readings = 0
    for _ in range(400):
        file = dice.choice(files)
        raw = bytearray(originals[file])
        at = dice.randrange(len(raw))
        kind = dice.randrange(3)
        if kind == 0:
            raw[at] = dice.randrange(256)
        elif kind == 1:
            del raw[at : at + dice.randrange(1, 20)]
        else:
            raw[at:at] = raw[at : at + dice.randrange(1, 20)]
        file.write_bytes(raw)
        try:
            for call in open_run(tmp_path / "a_v1.0").calls(on_damage="skip"):
                for slot in call.slots:
                    slot.numpy()
                    readings += 1
        except TensorprobeError as error:
            assert str(error)
        finally:
            file.write_bytes(originals[file])
    assert readings > 100


@pytest.mark.parametrize("target", ["forward_info_7.json", "nowhere.json"])
def test_a_link_in_place_of_a_checkers_file_is_damage(tmp_path: Path, target: str) -> None:
    (tmp_path / "forward_info_7.json").symlink_to(target)
    with pytest.raises(RunDamaged, match=r"forward_info_7\.json' is a symbolic link, where a run has a file"):
        open_run(tmp_path)


@pytest.mark.parametrize(
    "change", [{"input_kwargs": []}, {"input_kwargs": 10**400}, {"input_args": [{"dtype": "x", "shape": 3}]}]
)
def test_a_backward_whose_forward_is_no_call_is_read_or_damage(change: Any, tmp_path: Path) -> None:
    msprobe.write_conv_net(tmp_path)
    (file,) = tmp_path.rglob("dump.json")
    dump = json.loads(file.read_text())
    dump["data"]["Functional.conv2d.0.forward"] |= change
    file.write_text(json.dumps(dump))
    run = open_run(tmp_path)
    backward = "Functional.conv2d.0.backward"
    assert any(call.name == backward for call in run.calls(0, 0, on_damage="skip"))


@pytest.mark.parametrize("shape", [(2**14, 2**15), (0, 2**62), (1,) * 65], ids=["repeated", "empty", "deep"])
def test_a_file_that_grows_when_it_is_converted_is_one_clear_error(shape: tuple[int, ...], tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    torch.save(torch.ones(1).expand(shape) if 0 not in shape else torch.empty(shape), path)
    with pytest.raises(SettingsError, match="cannot be read"):
        parse("parse", ["-d", str(path), "-t", "npy", "-o", str(tmp_path / "out")])
