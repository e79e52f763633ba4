"""docs/migrating.md has a line for each thing that the documents of the older tools promise."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "migrating.md"
PROMISED: dict[str, str | list[str]] = {
    "The overview and the installation (ptdbg_ascend)": (
        "Overview Principle Conditions {api_type}_{api_name} Environment pip3 --force-reinstall Successfully wheel numpy "
        "pandas pyyaml clone configure ADAPTER_TARGET_PYTHON_PATH cmake make --upgrade Contributing Release"
    ),
    "The guide of ptdbg_ascend": (
        "seed_all mode set_dump_path fpath dump_tag register_hook overflow_nums dump_mode dump_config rank set_dump_switch "
        "scope api_list filter_switch list range stack acl api_stack set_overflow_check_switch set_backward_input compare "
        "npu_pkl_path bench_pkl_path npu_dump_data_dir bench_dump_data_dir is_print_compare_log shape_flag stack_mode "
        "auto_analyze fuzzy_match compare_distributed parse npu_dump_{timestamp} dump_list dump_path dump_op_switch Cosine "
        "MaxAbsErr Err_message NPU_Stack_Info Introduction Installation TASK_QUEUE_ENABLE prefixes npu_dump.pkl "
        "api_stack_npu_dump.pkl {dump_tag}_v1.0/rank{N} overflow_check Overflow_info_{timestamp}.pkl ValueError 1: 2: 3: 4: "
        "{deviceid}/{model_id} torch_npu.one_ npu_sign_bits_unpack advisor_{timestamp}.txt Performance set_device"
    ),
    "The guide of api_accuracy_checker": (
        "api_accuracy_checker.dump set_dump_switch update_config dump_path real_data enable_dataloader target_iter "
        "error_data_path forward_info_{pid}.json backward_info_{pid}.json stack_info_{pid}.json forward_real_data "
        "PyTorch backward_real_data run_ut.py -forward -backward -save_error_data --out_path accuracy_checking_result.csv "
        "accuracy_checking_details.csv run_overflow_check.py FAQ Features PYTHONPATH tqdm prettytable pyyaml Exception "
        "ut_error_data"
    ),
    "The guide of online compare (msprobe)": (
        "Overview Steps Constraints seed_all Failed PtdbgDispatch dump_mode dump_path tag api_list process_num debug Cosine "
        "msprobe_rank{id}_{timestamp} compare_result_rank{id}_{timestamp}.csv npu/ cpu/"
    ),
    "The questions of its FAQ": [
        *(f"check {number}" for number in range(1, 10)),
        *("fused op", "| 1: ", "| 2: ", "| 3: "),
        *(f"problem {number}" for number in range(2, 14)),
    ],
}
"""Heading of a table → what its lines must name: functions, parameters, files and questions of that document."""


@pytest.mark.parametrize(("heading", "names"), PROMISED.items(), ids=PROMISED)
def test_nothing_of_a_document_is_missing(heading: str, names: str | list[str]) -> None:
    text = PAGE.read_text(encoding="utf-8")
    section = re.split(r"\n#+ ", text.split(f"### {heading}\n", 1)[1], maxsplit=1)[0]
    rows = [line for line in section.splitlines() if line.startswith("|")]
    assert all(re.search(r"\| *\S.*\| *\S.*\|$", row) for row in rows)
    left = [
        name for name in (names.split() if isinstance(names, str) else names) if not any(name in row for row in rows)
    ]
    assert left == []
