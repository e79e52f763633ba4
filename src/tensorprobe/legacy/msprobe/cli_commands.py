"""The commands of `msprobe` on dumps: compare, parse, run_overflow_check, overflow_check.

Each takes the words behind its name and returns an exit code. `cli_checks` has the commands that run calls again.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from tensorprobe.errors import CannotCompare, SettingsError, TensorDamaged
from tensorprobe.legacy.compared.comparing import Wish, demand_output
from tensorprobe.legacy.layouts.pt import read_pt_file
from tensorprobe.legacy.msprobe import speak
from tensorprobe.legacy.msprobe.cli import Options
from tensorprobe.legacy.msprobe.compare import (
    Done,
    Parameters,
    check_stack_mode,
    compare_pair,
    compare_ranks,
    read_parameters,
    read_settings,
    stack_beside,
)
from tensorprobe.record import export_run, open_run
from tensorprobe.record.elements import to_torch
from tensorprobe.record.export import save_tensor
from tensorprobe.text import counted, plain, printable


def compare(command: str, arguments: Sequence[str]) -> int:
    """Write the tables and print where they are: 0 the dumps agree, 1 they differ, 2 nothing was measured."""
    given = _options(command).read(arguments)
    parameters = _parameters(given)
    speak()
    wish = Wish(
        output=demand_output(given.output_path, create=True),
        stack_mode=given.stack_mode or (given.input_path is None and _has_stacks(parameters.npu)),
        auto_analyze=not given.compare_only,
        fuzzy_match=given.fuzzy_match,
        print_log=parameters.print_log or given.is_print_compare_log,
        xlsx=given.xlsx,
    )
    check_stack_mode(parameters, wish.stack_mode)
    done = _compare(parameters, wish)
    sys.stdout.writelines(f"{path}\n" for path in done.paths)
    return done.exit_code


def _options(command: str) -> Options:
    options = Options(command, "Compare the dump of a device (NPU, target) with that of the bench (golden).")
    options.add_argument(
        "-i", "--input_path", metavar="FILE", help="compare.json with npu_path, bench_path, stack_path"
    )
    options.add_argument(
        "-tp", "--target_path", metavar="PATH", help="dump.json of the device, or the folder of its ranks"
    )
    options.add_argument("-gp", "--golden_path", metavar="PATH", help="the same of the bench")
    options.add_argument("-o", "--output_path", default="./output", metavar="FOLDER", help="for the results (./output)")
    options.switch("-s", "--stack_mode", help="a column with stacks; with -tp it is there whenever the dump has stacks")
    options.switch("-c", "--compare_only", help="no advisor")
    options.switch("-f", "-fm", "--fuzzy_match", help="pair the calls of an API in their order, whatever their numbers")
    options.switch("--xlsx", help="write .xlsx and not .csv")
    options.switch("-da", "--diff_analyze", help="name the first difference: that is always done")
    options.switch("-tensor_log", "--is_print_compare_log", help="log every row")
    return options


def _parameters(given: Any) -> Parameters:
    paths = {"npu_path": given.target_path, "bench_path": given.golden_path}
    if given.input_path is None:
        lacking = [name for name, path in (("-tp", given.target_path), ("-gp", given.golden_path)) if path is None]
        if lacking:
            raise SettingsError(f"{' and '.join(lacking)} is missing: pass -tp and -gp, or -i compare.json.")
        return read_parameters(paths)
    if given.target_path or given.golden_path:
        raise SettingsError("-i names a file with both paths: leave out -tp and -gp, or -i.")
    return read_parameters(read_settings(Path(given.input_path)))


def _has_stacks(dump: Path) -> bool:
    found = [dump] if dump.name == "dump.json" else [*dump.glob("dump.json"), *dump.glob("**/dump.json")]
    return bool(found) and all(map(stack_beside, found))


def _compare(parameters: Parameters, wish: Wish) -> Done:
    """By what the paths hold: one step of one rank on both sides, or more."""
    if all(len(open_run(path).segments()) == 1 for path in (parameters.npu, parameters.bench)):
        return compare_pair(parameters, wish)
    if parameters.stack is not None:
        raise SettingsError(
            f"stack_path '{parameters.stack}' is of one rank, and the dumps have several: leave it out."
        )
    return compare_ranks((parameters.npu, parameters.bench), wish)


_FORMS = ("npy", "pt")


def parse(command: str, arguments: Sequence[str]) -> int:
    """Write the files and say how many."""
    options = Options(command, "The tensors of a dump as files.")
    options.add_argument("-d", "--dump_path", metavar="PATH", help="a dump, a run, or one .pt or .npy file")
    options.add_argument("-t", "--type", default="pt", choices=_FORMS, help="form of the files (pt)")
    options.add_argument("-o", "--output_path", default="./output", metavar="FOLDER", help="for the files (./output)")
    given = options.read(arguments)
    if given.dump_path is None:
        raise SettingsError(
            "-d is missing: the dump to take tensors from. (The shell that 'msprobe parse' once opened is not here: "
            "tensorprobe inspect DUMP [CALL]   looks into a dump.)"
        )
    source, target = Path(given.dump_path), Path(given.output_path)
    if source.suffix in (".pt", ".npy") and source.is_file():
        said = str(_convert(source, target, given.type))
    else:
        said = _export(source, target, given.type)
    sys.stdout.write(f"{said}\n")
    return 0


def _export(source: Path, target: Path, form: Literal["npy", "pt"]) -> str:
    """Every tensor of a dump."""
    done = export_run(open_run(source), target, to=form)
    left = "".join(f"; {count:,} left out: {reason}" for reason, count in done.left_out.items())
    damaged = f"; {counted(done.damaged_lines, 'line')} cannot be read" if done.damaged_lines else ""
    return f"{plain(done.folder)}: {counted(done.tensors, 'tensor')}{left}{damaged}"


def _convert(source: Path, target: Path, form: str) -> Path:
    """One file in the other form; numpy has no bfloat16 and no float8, they become float32."""
    import numpy
    import torch

    try:
        if source.suffix == ".npy":
            held = torch.from_numpy(numpy.load(source, mmap_mode="c", allow_pickle=False))
        else:
            held = to_torch(*read_pt_file(source.resolve()))
        if form == "npy":
            narrow = held.is_floating_point() and held.dtype not in (torch.float16, torch.float32, torch.float64)
            held = (held.float() if narrow else held).detach().numpy()
    except (TensorDamaged, OSError, ValueError, TypeError, EOFError) as error:
        raise SettingsError(f"'{plain(source)}' cannot be read: {error}") from None
    path = demand_output(target, create=True) / f"{source.stem}.{form}"
    try:
        with path.open("xb") as file:
            save_tensor(held, file)
    except FileExistsError:
        raise SettingsError(f"'{plain(path)}' exists; nothing is overwritten. Choose another folder with -o.") from None
    return path


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

    kind = find_device()
    if jit_compile:
        set_jit_compile(kind)
    verdicts = set()
    for checked in check_calls(open_run(dump), device=kind if kind == "cpu" else f"{kind}:{device}"):
        verdicts.add(checked.verdict)
        sys.stdout.write(printable(f"{checked.call or '?'}: {checked.verdict}: {checked.reason}") + "\n")
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
