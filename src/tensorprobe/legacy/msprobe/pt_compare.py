"""`compare`: two dumps in, `compare_result_{time}.csv` or `.xlsx` and `advisor_{time}.txt` out.

Dumps are those of msprobe, of any generation; a run in another layout that tensorprobe reads is taken as well, on either
side. Three tables: with values, with statistics, with digests. A difference is never an exception. What does the work is
imported when it is called: a training script imports this module with the rest of the package.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def compare(
    input_param: Mapping[str, Any],
    output_path: str | os.PathLike[str],
    stack_mode: bool = False,
    auto_analyze: bool = True,
    fuzzy_match: bool = False,
    *,
    xlsx: bool = False,
) -> Path:
    """Compare the dump of a device with that of the bench; the path of the table comes back.

    `input_param` has `npu_json_path` and `bench_json_path` (or `npu_path`, `bench_path`): the dump.json of a rank. With
    `stack_mode` the table has the stacks, from `stack_json_path` or the stack.json beside the dump of the NPU; to give
    that file without the mode is an error. `auto_analyze` logs the first node that fails and writes the advice.
    `fuzzy_match` pairs the calls of an API in their order, whatever their numbers. `is_print_compare_log` logs every row.
    """
    from tensorprobe.legacy.compared.arguments import Wish, demand_bool, demand_output
    from tensorprobe.legacy.msprobe import speak
    from tensorprobe.legacy.msprobe.comparing import compare_pair
    from tensorprobe.legacy.msprobe.parameters import check_stack_mode, read_parameters

    speak()
    given = read_parameters(input_param)
    demand_bool("stack_mode", stack_mode)
    check_stack_mode(given, stack_mode)
    wish = Wish(
        output=demand_output(output_path, create=True),
        stack_mode=stack_mode,
        auto_analyze=auto_analyze,
        fuzzy_match=fuzzy_match,
        print_log=given.print_log,
        xlsx=xlsx,
    )
    return compare_pair(given, wish).paths[0]
