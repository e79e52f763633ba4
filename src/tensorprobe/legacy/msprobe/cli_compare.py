"""`msprobe compare`: with a compare.json (`-i`), or with the two paths themselves (`-tp`, `-gp`).

Paths of two dump.json files give one table; folders with the dumps of several ranks a table for each.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tensorprobe.errors import SettingsError
from tensorprobe.legacy.compared.arguments import Wish, demand_output
from tensorprobe.legacy.msprobe import speak
from tensorprobe.legacy.msprobe.cli_options import Options
from tensorprobe.legacy.msprobe.comparing import Done, compare_pair, compare_ranks
from tensorprobe.legacy.msprobe.parameters import Parameters, check_stack_mode, read_file, read_parameters, stack_beside
from tensorprobe.record import open_run


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
    return read_parameters(read_file(Path(given.input_path)))


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
