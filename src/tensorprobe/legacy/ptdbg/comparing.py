"""`compare`: two dumps in, `compare_result_{time}.csv` and `advisor_{time}.txt` out.

Dumps are those of ptdbg_ascend; a run in another layout that tensorprobe reads is taken as well. Pairing, measuring and the
rule of 2023 are tensorprobe's; here the answer is given in the old form. A difference is never an exception.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tensorprobe.legacy.compared.arguments import LOG_KEY, Wish, demand_bool, demand_output
from tensorprobe.legacy.compared.compared import Compared, only_places
from tensorprobe.legacy.ptdbg import speak
from tensorprobe.legacy.ptdbg.arguments import check_stack_mode, read_parameters
from tensorprobe.legacy.ptdbg.table import FORM
from tensorprobe.record import open_run


def compare(
    input_param: Mapping[str, Any],
    output_path: str | os.PathLike[str],
    shape_flag: bool = False,
    stack_mode: bool = False,
    auto_analyze: bool = True,
    suffix: str = "",
    fuzzy_match: bool = False,
) -> Path:
    """Compare the dump of a device with that of the bench; the path of the CSV comes back.

    `input_param` has `npu_pkl_path`, `bench_pkl_path`, the folders with their .npy files, `npu_dump_data_dir` and
    `bench_dump_data_dir` (by default those beside the pkl), and `is_print_compare_log`. `output_path` must exist.
    `shape_flag` changes nothing: tensors of different shapes are `Unmatched` always. `stack_mode` is for dumps of the mode
    api_stack, and adds the column with the stacks. `auto_analyze` logs the first node that fails and writes the advice.
    `fuzzy_match` pairs the calls of an API in their order, whatever their numbers.
    """
    speak()
    given = read_parameters(input_param)
    demand_bool("shape_flag", shape_flag)
    wish = Wish(
        output=demand_output(output_path),
        stack_mode=stack_mode,
        auto_analyze=auto_analyze,
        suffix=suffix,
        fuzzy_match=fuzzy_match,
        print_log=given.get(LOG_KEY, False),
    )
    check_stack_mode([(given["npu_pkl_path"], given["bench_pkl_path"])], stack_mode)
    npu, bench = (open_run(given[f"{side}_pkl_path"], given.get(f"{side}_dump_data_dir")) for side in ("npu", "bench"))
    places = only_places(npu, bench)
    compared = Compared.of(npu, bench, wish, FORM)
    written = compared.write(places)
    compared.log_answer()
    return written.path
