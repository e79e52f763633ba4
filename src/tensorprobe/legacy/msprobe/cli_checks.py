"""`msprobe run_ut`: each API of a dump alone, on the device and on the CPU in higher precision.

In: a dump.json, or any run that tensorprobe reads. Out: `accuracy_checking_result_{time}.csv` and
`accuracy_checking_details_{time}.csv`. Exit code 0: nothing failed, 1: something did, 2: nothing could be checked.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from tensorprobe.checks import PrecheckResult, precheck
from tensorprobe.errors import NotFound, SettingsError, TensorprobeError, nearest
from tensorprobe.files import read_settings
from tensorprobe.legacy.checker.run_ut import find_device, move_failures, set_jit_compile, write_tables
from tensorprobe.legacy.compared.comparing import demand_output, timestamp
from tensorprobe.legacy.msprobe import logger, speak
from tensorprobe.legacy.msprobe.cli import Options
from tensorprobe.record import Run, open_run
from tensorprobe.report.precheck_tables import api_name
from tensorprobe.text import plain

_RESULT = re.compile(r"accuracy_checking_result_([0-9]{14})\.csv")


def run_ut(command: str, arguments: Sequence[str]) -> int:
    """One process after the other."""
    return _run(_options(command).read(arguments), jobs=1)


def multi_run_ut(command: str, arguments: Sequence[str]) -> int:
    """As many processes as asked for."""
    options = _options(command)
    options.add_argument("-n", "--num_splits", type=int, metavar="N", help="processes (one for each processor)")
    given = options.read(arguments)
    jobs = len(os.sched_getaffinity(0)) if given.num_splits is None else given.num_splits
    if not 1 <= jobs <= 64:
        raise SettingsError(f"-n is {jobs}; it must be a number of processes from 1 to 64.")
    return _run(given, jobs=jobs)


def _options(command: str) -> Options:
    options = Options(command, "Check each recorded API alone.")
    options.add_argument("-api_info", "--api_info_file", required=True, metavar="FILE", help="dump.json")
    options.add_argument("-o", "--out_path", default="./", metavar="FOLDER", help="where the two tables go (./)")
    options.switch(
        "-save_error_data", help="save inputs and outputs of failing APIs, with a script that runs each alone"
    )
    options.switch("-j", "-jit_compile", "--jit_compile", help="compile operators on the NPU")
    options.add_argument(
        "-d", "--device", type=int, nargs="+", default=[0], metavar="ID", help="number of the device (0)"
    )
    options.switch("-f", "--filter_api", help="check calls once that differ in nothing but their values")
    options.add_argument(
        "-csv_path", "--result_csv_path", metavar="FILE", help="go on with a check that was stopped: its result table"
    )
    options.add_argument(
        "-config",
        "--config_path",
        metavar="FILE",
        help="config.json with white_list, black_list, error_data_path in run_ut",
    )
    return options


def _run(given: Any, *, jobs: int) -> int:
    speak()
    run = open_run(Path(given.api_info_file))
    lists = CheckLists() if given.config_path is None else read_lists(Path(given.config_path))
    folder, stamp = _place(given)
    device = _device(given.device)
    if given.jit_compile and set_jit_compile(device.partition(":")[0]):
        jobs = 0  # the mode is that of this process
    journal = folder / f".accuracy_checking_{stamp}"
    logger.info("results go to %s", folder / f"accuracy_checking_result_{stamp}.csv")
    try:
        result = precheck(
            run,
            device=device,
            data="real" if run.manifest.settings.get("mode") == "tensor" else "random",
            standard="noise-aware",
            calls=chosen_calls(run, lists),
            dedupe=given.filter_api,
            jobs=jobs,
            out=journal,
            resume=given.result_csv_path is not None,
            save_failures=given.save_error_data,
        )
    except KeyboardInterrupt:
        logger.warning(
            "stopped; go on with the same command and -csv_path %s", folder / f"accuracy_checking_result_{stamp}.csv"
        )
        raise
    except TensorprobeError:
        if given.result_csv_path is None:
            shutil.rmtree(journal, ignore_errors=True)  # nothing to go on with: the question itself was wrong
        raise
    errors = Path(lists.error_data_path or folder, f"ut_error_data{stamp}")
    replays = move_failures(result, journal, errors) if given.save_error_data else {}
    tables = write_tables(result.summary, folder, stamp=f"_{stamp}", spell=api_name)
    shutil.rmtree(journal)
    summary = msgspec.structs.replace(result.summary, output=str(tables[1]))
    sys.stdout.write(f"{PrecheckResult(summary, replays=replays)}\n")
    return result.exit_code


def _place(given: Any) -> tuple[Path, str]:
    """The folder for the tables, and the time in their names: now, or that of the check that is continued."""
    if given.result_csv_path is None:
        return demand_output(given.out_path, create=True), timestamp()
    table = Path(given.result_csv_path)
    match = _RESULT.fullmatch(table.name)
    if match is None or not (table.parent / f".accuracy_checking_{match[1]}").is_dir():
        raise SettingsError(
            f"-csv_path '{table}' names no check that was stopped: it is accuracy_checking_result_{{time}}.csv, "
            "as the log said when the check began. Leave it out to check everything."
        )
    return table.parent, match[1]


def _device(numbers: Sequence[int]) -> str:
    device = find_device()
    if device == "cpu":
        return device
    if len(numbers) > 1:
        logger.warning("calls run on %s:%d; the other devices of -d are not used", device, numbers[0])
    return f"{device}:{numbers[0]}"


class CheckLists(msgspec.Struct, frozen=True):
    """The part of a config.json that a check reads."""

    white_list: list[str] = []
    black_list: list[str] = []
    error_data_path: str | None = None


class _Config(msgspec.Struct, frozen=True):
    run_ut: CheckLists = CheckLists()
    acc_check: CheckLists | None = None


def read_lists(path: Path) -> CheckLists:
    """The lists; the newer spelling of the section is `acc_check`."""
    try:
        config = msgspec.json.decode(read_settings(path), type=_Config)
    except OSError as error:
        raise SettingsError(f"'{plain(path)}' cannot be read: {error.strerror}.") from None
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise SettingsError(f"'{plain(path)}' is no config.json: {error}.") from None
    lists = config.acc_check or config.run_ut
    if lists.white_list and lists.black_list:
        raise SettingsError(f"'{plain(path)}' has both a white_list and a black_list: one of them must be empty.")
    return lists


def chosen_calls(run: Run, lists: CheckLists) -> list[str] | None:
    """A glob for each op that is to be checked; None when nothing was chosen. NotFound for a name that the dump does not have."""
    asked = lists.white_list or lists.black_list
    if not asked:
        return None
    ops = {
        entry.name.rsplit(".", 2)[0]
        for place in run.segments()
        for entry in run.segment(*place).index().entries
        if entry.name.endswith(".forward")
    }
    known = {op: {op, op.partition(".")[2]} for op in ops}
    for name in asked:
        if not any(name in spellings for spellings in known.values()):
            close = nearest(name, {spelling for spellings in known.values() for spelling in spellings})
            raise NotFound(f"no API {name!r} in '{plain(run.path)}'. Nearest: {', '.join(close) or 'none'}")
    listed = {op for op, spellings in known.items() if spellings & {*asked}}
    return sorted(f"{op}.*" for op in (listed if lists.white_list else ops - listed))
