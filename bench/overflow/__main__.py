"""Measure the overflow watch: does it name planted NaN and inf, does it raise false alarms, what does it cost?

    python -m bench.overflow                                 everything (half an hour; the costs need an idle machine)
    python -m bench.overflow --parts planted
    python -m bench.overflow --parts clean --models bert,llama
    python -m bench.overflow --parts overhead --sizes tiny,small --repeats 1

Every measurement is a process of its own; those of the costs take turns, and the whole round is repeated. Prints tables and
writes `bench/results/overflow.json`; parts that were not asked for stay in it as they were. Exits with 1 when a
measurement failed. A missed target is a result, not a failure.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.driver import RESULTS, Row, Task, run_parts, run_rounds, words_of
from bench.overflow.table import print_tables

PARTS = ("planted", "clean", "overhead")
SIZES = ("tiny", "small", "medium")
PLACES = ("cpu", "npu", "npu, wrong kernels", "two ranks")
MODELS = ("bert", "llama", "qwen-moe", "mamba", "resnet", "vit")


def list_tasks(part: str, options: argparse.Namespace) -> list[Task]:
    if part == "overhead":
        return [Task("bench.overflow.overhead", {"size": size}, ("--size", size)) for size in options.sizes]
    if part == "planted":
        return [Task("bench.overflow", {"place": place}, ("--worker", "planted", "--place", place)) for place in PLACES]
    arguments = ("--worker", "clean", "--models")
    return [Task("bench.overflow", {"model": model}, (*arguments, model)) for model in options.models]


def measure(part: str, options: argparse.Namespace, work: Path) -> list[Row]:
    """The rows of a part, of all rounds; a row with `error` is a measurement that failed."""
    cases = run_rounds(list_tasks(part, options), options, work, options.repeats if part == "overhead" else 1)
    return [{**case, **row} for case in cases for result in case.pop("rounds") for row in result.get("rows", [result])]


def work_on(options: argparse.Namespace) -> list[dict[str, Any]]:
    """The work of one process."""
    import torch

    torch.set_num_threads(options.threads)
    if options.worker == "planted":
        from bench.overflow.planted import outcomes_of

        return [
            {**asdict(each), "error": each.error, "missed": each.missed, "false": each.false, "exact": each.exact}
            for each in outcomes_of(options.place)
        ]
    from bench.overflow.clean import clean_rows

    return list(clean_rows(options.models))


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, known in {"parts": PARTS, "sizes": SIZES, "models": MODELS}.items():
        parser.add_argument(
            f"--{name}", type=words_of("|".join(known)), default=list(known), help="of " + ", ".join(known)
        )
    parser.add_argument("--repeats", type=int, default=3, help="rounds of the costs")
    parser.add_argument("--threads", type=int, default=1, help="torch threads")
    parser.add_argument("--time-limit", type=float, default=900, help="seconds for one process")
    parser.add_argument("--output", type=Path, default=RESULTS / "overflow.json")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--place", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    options = parse_options()
    if options.worker:
        print(json.dumps({"rows": work_on(options)}), flush=True)
        return 0
    return run_parts(options, measure, print_tables)


if __name__ == "__main__":
    sys.exit(main())
