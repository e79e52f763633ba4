"""One measurement of the old names: dumped steps of a workload, or one comparison of the two dumps that they leave.

    <work>/npu/bench_v1.0/rank0/dump.pkl, <work>/gpu/bench_v1.0/rank0/dump.pkl     dumps of two training steps: all values differ

Prints one JSON line, the last of stdout: seconds, and bytes as they are on disk.
"""

from __future__ import annotations

import argparse
import logging
import shutil
from pathlib import Path
from typing import Any

from bench.measure import folder_size, time_call
from bench.protocol import print_result

SIDES = ("npu", "gpu")
TAG = "bench"


def rank_folder(work: Path, side: str) -> Path:
    return work / side / f"{TAG}_v1.0" / "rank0"


def measure_dumps(options: argparse.Namespace) -> dict[str, Any]:
    """Plain and dumped steps in turns, after two plain steps for warming up."""
    import torch

    import ptdbg_ascend
    from bench.workloads import build_named

    logging.getLogger("ptdbg_ascend").setLevel(logging.ERROR)
    torch.set_num_threads(options.threads)
    work = build_named(options.workload)
    for _ in range(2):
        work.step()
    result: dict[str, Any] = {"plain_s": [], "on_s": [], "step_s": [], "off_s": [], "bytes": []}
    for number in range(options.steps):
        side = SIDES[number % 2]
        shutil.rmtree(options.work / side, ignore_errors=True)
        ptdbg_ascend.set_dump_path(options.work / side / "dump.pkl", dump_tag=TAG)
        ptdbg_ascend.register_hook(work.model, ptdbg_ascend.acc_cmp_dump)
        result["plain_s"] += [time_call(work.step).wall_s for _ in range(2)]
        result["on_s"].append(time_call(lambda: ptdbg_ascend.set_dump_switch("ON")).wall_s)
        result["step_s"].append(time_call(work.step).wall_s)
        result["off_s"].append(time_call(lambda: ptdbg_ascend.set_dump_switch("OFF")).wall_s)
        size, files = folder_size(rank_folder(options.work, side))
        result["bytes"].append(size)
        result["files"] = files
    return result


def measure_compare(options: argparse.Namespace) -> dict[str, Any]:
    """One call of `compare`, and the bytes of both dumps."""
    import ptdbg_ascend

    logging.getLogger("ptdbg_ascend").setLevel(logging.ERROR)
    npu, gpu = (rank_folder(options.work, side) for side in SIDES)
    output = options.work / "output"
    output.mkdir(exist_ok=True)
    parameters = {
        "npu_pkl_path": npu / "dump.pkl",
        "npu_dump_data_dir": npu / "dump",
        "bench_pkl_path": gpu / "dump.pkl",
        "bench_dump_data_dir": gpu / "dump",
        "is_print_compare_log": False,
    }
    spent = time_call(lambda: ptdbg_ascend.compare(parameters, output))
    return {"compare_s": spent.wall_s, "bytes": folder_size(npu)[0] + folder_size(gpu)[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["dump", "compare"])
    parser.add_argument("--workload", default="gpt-tiny")
    parser.add_argument("--steps", type=int, default=2, help="at least 2: one dump for each side")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--work", type=Path, required=True, help="a folder for the dumps; it must exist")
    options = parser.parse_args()
    print_result(measure_dumps(options) if options.what == "dump" else measure_compare(options))


if __name__ == "__main__":
    main()
