"""`compare_distributed`: the dumps of all ranks of two runs, rank by rank; a table for each pair.

In: two folders `{dump_path}/step{S}` that hold `rank0`, `rank1`, …, or the ones above them. Steps and ranks meet by their
number. One comparison covers all of them; what is written does not depend on how many ranks are compared at once.
"""

from __future__ import annotations

import os
from pathlib import Path


def compare_distributed(
    npu_dump_dir: str | os.PathLike[str],
    bench_dump_dir: str | os.PathLike[str],
    output_path: str | os.PathLike[str],
    *,
    stack_mode: bool = False,
    auto_analyze: bool = True,
    fuzzy_match: bool = False,
    is_print_compare_log: bool = False,
    xlsx: bool = False,
    jobs: int | None = None,
) -> list[Path]:
    """Compare the dumps of all ranks; the paths of the tables come back: `compare_result_rank0-rank0_{time}.csv`.

    The keywords are those of `compare`. `jobs` ranks are compared at once, by default as many as there are processors.
    """
    from tensorprobe.legacy.compared.arguments import Wish, demand_folder, demand_output
    from tensorprobe.legacy.msprobe import speak
    from tensorprobe.legacy.msprobe.comparing import compare_ranks

    speak()
    folders = demand_folder("npu_dump_dir", npu_dump_dir), demand_folder("bench_dump_dir", bench_dump_dir)
    wish = Wish(
        output=demand_output(output_path, create=True),
        stack_mode=stack_mode,
        auto_analyze=auto_analyze,
        fuzzy_match=fuzzy_match,
        print_log=is_print_compare_log,
        xlsx=xlsx,
    )
    return compare_ranks(folders, wish, jobs=jobs).paths
