"""Online compare measured: what it costs, how much it compares, what it finds, and whether it cries wolf.

    python bench/online.py                                   everything (an hour; the costs need an idle machine)
    python bench/online.py --parts overhead --sizes tiny,small
    python bench/online.py --parts models --models bert,lstm --places cpu,sim
    python bench/online.py --parts faults

Every measurement is a process of its own; those of the costs take turns, and the whole round is repeated. Prints tables and
writes `bench/results/online.json`; parts that were not asked for stay in it as they were. Exits with 1 when a
measurement failed. A missed target is a result, not a failure.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec
from capture import run_task
from online_table import print_tables

HERE = Path(__file__).resolve().parent
PARTS = ("overhead", "models", "faults")
SIZES, DEVICES = ("tiny", "small", "medium"), ("cpu", "sim")
WAYS = [("cpu", 0, 1), ("cpu", 1, 1), ("cpu-fp64", 0, 1), ("cpu-fp64", 1, 1), ("cpu", 0, 10), ("cpu-fp64", 0, 10)]
"""Reference, workers, every."""
MODELS = ("bert", "llama", "qwen-moe", "vit", "resnet", "lstm")
PLACES = ("cpu", "sim", "sim, other sums")
NUMBERS = ("fp32", "bf16 autocast", "fp16 autocast", "bf16", "fp16")
REFERENCES = ("cpu-fp64", "cpu")


@dataclass(frozen=True)
class Task:
    """A process to run: a file of this folder with arguments; `about` is what it measures."""

    tool: str
    about: dict[str, Any]
    arguments: tuple[str, ...]

    def command(self, options: argparse.Namespace, work: Path) -> list[str]:
        return [sys.executable, str(HERE / self.tool), *self.arguments, "--threads", str(options.threads)]


def overhead_tasks(options: argparse.Namespace) -> Iterator[Task]:
    for size in options.sizes:
        for device in options.devices:
            for reference, workers, every in WAYS:
                about = {"size": size, "device": device, "reference": reference, "workers": workers, "every": every}
                arguments = [part for name, value in about.items() for part in (f"--{name}", str(value))]
                yield Task("online_overhead.py", about, tuple(arguments))


def inner_task(options: argparse.Namespace, part: str, **about: str) -> Task:
    """This file again, for one part of the work."""
    settings = {"numbers": options.numbers, "references": options.references, "faults": options.faults}
    arguments = ["--worker", part]
    for name, value in {**settings, **{f"{key}s": [each] for key, each in about.items()}}.items():
        arguments += [f"--{name}", ";".join(value)] if value else []
    return Task("online.py", {"part": part, **about}, tuple(arguments))


def run_rounds(tasks: list[Task], options: argparse.Namespace, repeats: int, work: Path) -> list[dict[str, Any]]:
    """For each task what it measured, once for each round."""
    rounds: dict[int, list[dict[str, Any]]] = {number: [] for number in range(len(tasks))}
    for turn in range(repeats):
        for number, task in enumerate(tasks):
            label = " ".join(f"{name}={value}" for name, value in task.about.items())
            print(f"round {turn + 1} of {repeats}: {label}", file=sys.stderr, flush=True)
            result = run_task(task, options, work)  # type: ignore[arg-type]
            if "error" in result:
                print(f"  failed: {result['error']}", file=sys.stderr, flush=True)
            rounds[number].append(result)
    return [{**task.about, "rounds": rounds[number]} for number, task in enumerate(tasks)]


def measure(part: str, options: argparse.Namespace, work: Path) -> list[dict[str, Any]]:
    """The rows of a part; a row with `error` is a measurement that failed."""
    if part == "overhead":
        return run_rounds(list(overhead_tasks(options)), options, options.repeats, work)
    if part == "models":
        tasks = [
            inner_task(options, part, model=model, place=place) for model in options.models for place in options.places
        ]
    else:
        tasks = [inner_task(options, part)]
    rows = []
    for case in run_rounds(tasks, options, 1, work):
        (result,) = case.pop("rounds")
        rows += [{**case, **result}] if "error" in result else result["rows"]
    return rows


def worker(options: argparse.Namespace) -> None:
    """The work of one process of the parts `models` and `faults`."""
    import torch
    from protocol import print_result

    from tensorprobe import sim

    warnings.simplefilter("ignore")  # of torch and transformers: they are not what is measured
    torch.set_num_threads(options.threads)
    sim.enable("npu")
    if options.worker == "models":
        from online_models import watch_all

        (model,) = options.models
        print_result({"rows": list(watch_all(model, options.places, options.numbers, options.references))})
    else:
        from online_faults import plant

        entries = [entry for entry in sim.catalog() if not options.faults or entry.name in options.faults]
        print_result({"rows": [asdict(outcome) for outcome in plant(entries, options.references)]})


def words(text: str) -> list[str]:
    """Words with semicolons or commas between; `sim, other sums` has a comma of its own."""
    if ";" not in text and text not in PLACES:
        text = text.replace(",", ";")
    return [word.strip() for word in text.split(";") if word.strip()]


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = {
        "parts": PARTS,
        "sizes": SIZES,
        "devices": DEVICES,
        "models": MODELS,
        "places": PLACES,
        "numbers": NUMBERS,
        "references": REFERENCES,
    }
    for name, choices in known.items():
        parser.add_argument(f"--{name}", type=words, default=list(choices), help="of " + "; ".join(choices))
    parser.add_argument("--faults", type=words, default=[], help="names of the catalog; all when not given")
    parser.add_argument("--repeats", type=int, default=3, help="rounds of the costs")
    parser.add_argument("--threads", type=int, default=1, help="torch threads")
    parser.add_argument("--time-limit", type=float, default=1800, help="seconds for one process")
    parser.add_argument("--output", type=Path, default=HERE / "results" / "online.json")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    for name, choices in known.items():
        for unknown in set(getattr(options, name)) - set(choices):
            parser.error(f"--{name}: {unknown!r} is not one of {'; '.join(choices)}")
    return options


def has_failed(row: dict[str, Any]) -> bool:
    return bool(row.get("error")) or any("error" in result for result in row.get("rounds", ()))


def main() -> int:
    options = parse_options()
    if options.worker:
        worker(options)
        return 0
    machine = {"platform": platform.platform(), "python": platform.python_version(), "cores": os.cpu_count()}
    report = json.loads(options.output.read_text()) if options.output.exists() else {}
    measured = {}
    with tempfile.TemporaryDirectory(prefix="online-") as work:
        for part in options.parts:
            measured[part] = measure(part, options, Path(work))
            report[part] = {"machine": machine, "threads": options.threads, "rows": measured[part]}
            options.output.parent.mkdir(parents=True, exist_ok=True)
            options.output.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1))  # inf is null
    print_tables(measured)
    print(f"Written to {options.output}")
    return int(any(has_failed(row) for rows in measured.values() for row in rows))


if __name__ == "__main__":
    sys.exit(main())
