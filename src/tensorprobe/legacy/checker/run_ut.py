"""`run_ut.py -forward F -backward B`: each recorded call alone, on the device and on the CPU in higher precision.

In: the files that `api_accuracy_checker.dump` wrote. Out: `accuracy_checking_result.csv` and
`accuracy_checking_details.csv` in `--out_path`, in place of earlier ones; nothing else in that folder is touched.
Exit code 0: nothing failed, 1: something did, 2: nothing could be checked. The standard is the older tool's, `seed`.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec

from tensorprobe.checks import PrecheckResult, precheck
from tensorprobe.errors import SettingsError
from tensorprobe.files import Replacement
from tensorprobe.legacy.checker import logger, speak
from tensorprobe.legacy.checker.config import msCheckerConfig
from tensorprobe.legacy.layouts.checker_reader import open_checker, open_checker_files
from tensorprobe.legacy.layouts.checker_writer import find_unfinished, finish_recording
from tensorprobe.model.precheck import Precheck
from tensorprobe.ops.names import parse_call_name
from tensorprobe.record import Run
from tensorprobe.report.ending import ended
from tensorprobe.report.precheck_tables import (
    DETAIL_COLUMNS,
    DETAILS_FILE,
    OLDER_COLUMNS,
    RESULT_COLUMNS,
    RESULT_FILE,
    detail_rows,
    result_rows,
    write_rows,
)
from tensorprobe.text import shell

ERROR_FOLDER = "ut_error_data"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; the exit code comes back."""
    speak()
    return ended(lambda: _run(_parser().parse_args(arguments)), about="dump")


def _run(given: argparse.Namespace) -> int:
    result = run_ut(
        Path(given.forward_info_file),
        Path(given.backward_info_file),
        out_path=Path(given.out_path),
        save_error_data=given.save_error_data,
        error_data_path=given.error_data_path,
        jit_compile=given.jit_compile,
        device_id=given.device,
    )
    sys.stdout.write(f"{result}\n{_STANDARD.format(shell(given.forward_info_file))}\n")
    return result.exit_code


_STANDARD = (
    "Judged by the standard of the older tool (seed). To judge each op by its own rounding:   "
    "tensorprobe precheck {} --standard noise-aware"
)


def run_ut(
    forward: Path,
    backward: Path,
    *,
    out_path: Path = Path(),
    save_error_data: bool = False,
    error_data_path: str | None = None,
    jit_compile: bool = False,
    device_id: int = 0,
) -> PrecheckResult:
    """Check the calls of a dump and write the two tables. TensorprobeError for what the user can mend."""
    try:
        out_path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SettingsError(f"--out_path is '{out_path}', which cannot be made: {error.strerror}.") from None
    _write_unfinished(forward)
    run, in_this_process = _open(forward, backward)
    device = find_device(device_id)
    if jit_compile:
        in_this_process |= set_jit_compile(device.partition(":")[0])
    errors = Path(error_data_path or msCheckerConfig.error_data_path, ERROR_FOLDER)
    with tempfile.TemporaryDirectory(prefix=".run_ut_", dir=out_path) if save_error_data else nullcontext() as scratch:
        result = precheck(
            run,
            device=device,
            data="real" if run.manifest.settings["mode"] == "tensor" else "random",
            standard="seed",
            jobs=0 if in_this_process else 1,
            out=None if scratch is None else Path(scratch, "precheck"),
            save_failures=save_error_data,
        )
        replays = {} if scratch is None else move_failures(result, Path(scratch, "precheck"), errors)
    summary = msgspec.structs.replace(result.summary, output=str(out_path / DETAILS_FILE))
    write_tables(summary, out_path, spell=spell)
    return PrecheckResult(summary, replays=replays)


def find_device(number: int = 0) -> str:
    """Return npu where there is one, then cuda, then the CPU itself, whose own dtypes are checked against wider ones.

    SettingsError if the machine has no device with that number.
    """
    import torch

    if importlib.util.find_spec("torch_npu") is not None:
        import_module("torch_npu")  # without it torch does not know its devices
    for name in ("npu", "cuda"):
        home: Any = getattr(torch, name, None)
        if home is not None and home.is_available():
            if not 0 <= number < home.device_count():
                raise SettingsError(f"--device is {number}; this machine has {home.device_count()} {name} devices.")
            return f"{name}:{number}" if number else name
    return "cpu"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="run_ut.py", description="Check each recorded API alone.", allow_abbrev=False)
    for side in ("forward", "backward"):
        parser.add_argument(
            f"-{side}",
            f"--{side}_input_file",
            f"--{side}_info_file",
            dest=f"{side}_info_file",
            required=True,
            metavar="FILE",
            help=f"{side}_info_{{pid}}.json",
        )
    parser.add_argument("-o", "--out_path", default="./", metavar="FOLDER", help="where the two tables go (./)")
    parser.add_argument(
        "-save_error_data", action="store_true", help=f"save inputs and outputs of failing APIs in ./{ERROR_FOLDER}"
    )
    parser.add_argument("--error_data_path", metavar="FOLDER", help=f"where {ERROR_FOLDER} goes (./)")
    parser.add_argument("-j", "-jit_compile", "--jit_compile", action="store_true", help="compile operators on the NPU")
    parser.add_argument("-d", "--device", type=int, default=0, metavar="ID", help="number of the device (0)")
    return parser


def _open(forward: Path, backward: Path) -> tuple[Run, bool]:
    """The dump, and whether only this process can open it: another one finds a backward file by its name alone."""
    if not backward.is_file():
        open_checker_files(forward, backward)  # says what is missing
    run = open_checker(forward) if forward.is_file() else None
    beside = forward.with_name(forward.name.replace("forward_info_", "backward_info_", 1))
    if run is not None and beside != forward and beside.exists() and beside.samefile(backward):
        return run, False
    return open_checker_files(forward, backward), True


def _write_unfinished(forward: Path) -> None:
    """A program that was killed together with its guard has left a recording, and no files."""
    recording = find_unfinished(forward)
    if recording is not None:
        logger.warning(
            "'%s' was never written: its program was killed. It is written now from what it had recorded.", forward
        )
        finish_recording(recording)


def set_jit_compile(device: str) -> bool:
    """Tell the NPU to compile operators; whether that was possible."""
    import torch

    set_mode: Callable[..., Any] | None = getattr(getattr(torch, device, None), "set_compile_mode", None)
    if set_mode is None:
        logger.info("-jit_compile has no effect: device %s has no compile mode.", device)
        return False
    set_mode(jit_compile=True)
    return True


def move_failures(result: PrecheckResult, scratch: Path, target: Path) -> dict[str, str]:
    """Put what was saved of failing calls into the target, in place of what has the same name there. Scripts by call come back."""
    saved = scratch / "failures"
    for entry in sorted(saved.iterdir()) if saved.is_dir() else ():
        target.mkdir(parents=True, exist_ok=True)
        place = target / entry.name
        if place.is_dir() and not place.is_symlink():
            shutil.rmtree(place)
        shutil.move(entry, place)
    moved = {call: target / Path(script).relative_to(saved.absolute()) for call, script in result.replays.items()}
    return {call: os.path.relpath(script) for call, script in moved.items()}


def write_tables(summary: Precheck, folder: Path, *, stamp: str = "", spell: Callable[[str], str]) -> tuple[Path, Path]:
    """The two tables, with a time in their names or without; their paths come back. `spell` names a call."""
    result_file, details_file = (folder / name.replace(".csv", f"{stamp}.csv") for name in (RESULT_FILE, DETAILS_FILE))
    result = [row[: len(RESULT_COLUMNS)] for row in result_rows(summary, spell=spell)]
    _write(result_file, RESULT_COLUMNS, [[cell or "N/A" for cell in row[:3]] + list(row[3:]) for row in result])
    details = (_in_order(_as_shipped(row), "") for row in detail_rows(summary, spell=spell))
    _write(details_file, _in_order(DETAIL_COLUMNS, "Max Abs Err Message"), details)
    return result_file, details_file


def _as_shipped(row: Sequence[Any]) -> list[Any]:
    """Return a row of the details with the older tool's spelling: `torch.float32`, `(4, 8)`, and N/A for what is missing."""
    cells = dict(zip(DETAIL_COLUMNS, row, strict=True))
    for column in ("Bench Dtype", "NPU Dtype"):
        cells[column] = cells[column] and f"torch.{cells[column].removeprefix('torch.')}"
    cells["Shape"] = cells["Shape"] and str(tuple(json.loads(cells["Shape"])))
    for column in (*OLDER_COLUMNS, "Max Abs Error"):
        if cells[column] == "" and not column.endswith("Message"):
            cells[column] = "N/A"
    return list(cells.values())


def _in_order(row: Sequence[Any], beside: Any) -> list[Any]:
    """Return a row of the details in the order of the older tool, with the absolute error behind the relative one."""
    cells = list(row)
    greatest = cells.pop(DETAIL_COLUMNS.index("Max Abs Error"))
    at = DETAIL_COLUMNS.index("Max Rel Err Message") + 1
    return [*cells[:at], greatest, beside, *cells[at:]]


def spell(label: str) -> str:
    """The name of a call as the JSON files have it: `Functional*conv2d*0`."""
    op, number, _ = parse_call_name(label)
    return "*".join((*op.split(".", 1), number))


def _write(path: Path, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    with Replacement(path) as unfinished:
        write_rows(unfinished, columns, rows)


if __name__ == "__main__":
    sys.exit(main())
