"""`msprobe run_overflow_check` and `overflow_check`: whether a NaN or infinity is the device's doing, and where the first one is."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from tensorprobe.errors import CannotCompare, SettingsError
from tensorprobe.legacy.msprobe.cli_options import Options


def run_overflow_check(command: str, arguments: Sequence[str]) -> int:
    """Run the calls of a dump again, and say which overflow only on the device."""
    options = Options(command, "Run recorded APIs again, and say which overflow is to be expected.")
    options.add_argument("-api_info", "--api_info_file", required=True, metavar="FILE", help="dump.json")
    options.switch("-j", "-jit_compile", "--jit_compile", help="compile operators on the NPU")
    options.add_argument("-d", "--device", type=int, default=0, metavar="ID", help="number of the device (0)")
    given = options.read(arguments)
    return replay_overflow(Path(given.api_info_file), device=given.device, jit_compile=given.jit_compile)


def overflow_check(command: str, arguments: Sequence[str]) -> int:
    """Look through a dump for its first NaN or infinity."""
    options = Options(command, "Find where a dump has its first NaN or infinity.")
    options.add_argument("-i", "--input_path", metavar="FOLDER", help="the folder of a step, or a run")
    options.add_argument("-api_info", "--api_info_file", metavar="FILE", help="dump.json, as for run_overflow_check")
    options.add_argument("-o", "--output_path", default="./output", metavar="FOLDER", help="for the result (./output)")
    given = options.read(arguments)
    if (given.input_path is None) == (given.api_info_file is None):
        raise SettingsError("overflow_check takes either -i FOLDER or -api_info FILE.")
    if given.input_path is None:
        return replay_overflow(Path(given.api_info_file), device=0, jit_compile=False)
    return find_overflow(Path(given.input_path), Path(given.output_path))


def replay_overflow(dump: Path, *, device: int, jit_compile: bool) -> int:
    """The exit code: 0 every overflow is to be expected, 1 some are the device's own, 2 nothing could be run."""
    from tensorprobe.legacy.checker.run_overflow_check import check_calls
    from tensorprobe.legacy.checker.run_ut import find_device, set_jit_compile
    from tensorprobe.record import open_run

    kind = find_device()
    if jit_compile:
        set_jit_compile(kind)
    verdicts = set()
    for checked in check_calls(open_run(dump), device=kind if kind == "cpu" else f"{kind}:{device}"):
        verdicts.add(checked.verdict)
        sys.stdout.write(f"{checked.call or '?'}: {checked.verdict}: {checked.reason}\n")
    if not verdicts - {"unknown"}:
        raise CannotCompare(f"no call of '{dump}' could be run again.")
    return int("abnormal" in verdicts)


def find_overflow(dump: Path, output: Path) -> int:
    """The exit code: 0 there is none, 1 there is one."""
    from tensorprobe.watches.overflow import find_overflow as find

    result = find(dump)
    output.mkdir(parents=True, exist_ok=True)
    (output / "overflow.json").write_text(result.to_json(), encoding="utf-8")
    sys.stdout.write(f"{result}\nThe result in full: {output / 'overflow.json'}\n")
    return result.exit_code
