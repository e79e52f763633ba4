"""The overflow watch measured: does it name planted births, does it cry wolf, what does it cost.

    python bench/overflow.py                                 everything (half an hour; the costs need an idle machine)
    python bench/overflow.py --parts births
    python bench/overflow.py --parts clean --models bert,llama
    python bench/overflow.py --parts overhead --sizes tiny,small --repeats 1

Every measurement is a process of its own; those of the costs take turns, and the whole round is repeated. Prints tables and
writes `bench/results/overflow.json`; parts that were not asked for stay in it as they were. Exits with 1 when a
measurement failed. A missed target is a result, not a failure.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from capture import run_task
from overflow_table import print_tables

HERE = Path(__file__).resolve().parent
PARTS = ("births", "clean", "overhead")
SIZES = ("tiny", "small", "medium")
PLACES = ("cpu", "npu", "npu, wrong kernels", "two ranks")
MODELS = ("bert", "llama", "qwen-moe", "mamba", "resnet", "vit")


@dataclass(frozen=True)
class Task:
    """A process to run: a file of this folder with arguments; `about` is what it measures."""

    tool: str
    about: dict[str, str]
    arguments: tuple[str, ...]

    def command(self, options: argparse.Namespace, work: Path) -> list[str]:
        return [sys.executable, str(HERE / self.tool), *self.arguments, "--threads", str(options.threads)]


def list_tasks(part: str, options: argparse.Namespace) -> list[Task]:
    if part == "overhead":
        return [Task("overflow_overhead.py", {"size": size}, ("--size", size)) for size in options.sizes]
    if part == "births":
        return [Task("overflow.py", {"place": place}, ("--worker", "births", "--place", place)) for place in PLACES]
    arguments = ("--worker", "clean", "--models")
    return [Task("overflow.py", {"model": model}, (*arguments, model)) for model in options.models]


def measure(part: str, options: argparse.Namespace, work: Path) -> list[dict[str, Any]]:
    """The rows of a part, of all rounds; a row with `error` is a measurement that failed."""
    rows: list[dict[str, Any]] = []
    tasks = list_tasks(part, options)
    for turn in range(options.repeats if part == "overhead" else 1):
        for task in tasks:
            label = " ".join(task.about.values())
            print(f"{part}, round {turn + 1}: {label}", file=sys.stderr, flush=True)
            result = run_task(task, options, work)  # type: ignore[arg-type]
            if "error" in result:
                print(f"  failed: {result['error']}", file=sys.stderr, flush=True)
            rows += [{**task.about, **row} for row in result.get("rows", [result])]
    return rows


def work_on(options: argparse.Namespace) -> list[dict[str, Any]]:
    """The work of one process."""
    import torch

    torch.set_num_threads(options.threads)
    if options.worker == "births":
        from overflow_births import outcomes_of

        return [
            {**asdict(each), "error": each.error, "missed": each.missed, "false": each.false, "exact": each.exact}
            for each in outcomes_of(options.place)
        ]
    from overflow_clean import clean_rows

    return list(clean_rows(options.models))


def words_of(known: tuple[str, ...]) -> Any:
    """A reader of words with commas between."""

    def words(text: str) -> list[str]:
        found = [word for word in text.split(",") if word]
        for word in found:
            if word not in known:
                raise argparse.ArgumentTypeError(f"{word!r} is not one of {', '.join(known)}")
        return found

    return words


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, known in {"parts": PARTS, "sizes": SIZES, "models": MODELS}.items():
        parser.add_argument(f"--{name}", type=words_of(known), default=list(known), help="of " + ", ".join(known))
    parser.add_argument("--repeats", type=int, default=3, help="rounds of the costs")
    parser.add_argument("--threads", type=int, default=1, help="torch threads")
    parser.add_argument("--time-limit", type=float, default=900, help="seconds for one process")
    parser.add_argument("--output", type=Path, default=HERE / "results" / "overflow.json")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--place", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    options = parse_options()
    if options.worker:
        print(json.dumps({"rows": work_on(options)}), flush=True)
        return 0
    machine = {"platform": platform.platform(), "python": platform.python_version(), "cores": os.cpu_count()}
    report = json.loads(options.output.read_text()) if options.output.exists() else {}
    measured = {}
    with tempfile.TemporaryDirectory(prefix="overflow-") as work:
        for part in options.parts:
            measured[part] = measure(part, options, Path(work))
            report[part] = {"machine": machine, "threads": options.threads, "rows": measured[part]}
            options.output.parent.mkdir(parents=True, exist_ok=True)
            options.output.write_text(json.dumps(report, indent=1))
    print_tables(measured)
    print(f"Written to {options.output}")
    return int(any(row.get("error") for rows in measured.values() for row in rows))


if __name__ == "__main__":
    sys.exit(main())
