"""Measure online compare: its cost, the share of calls compared, the faults found, the false alarms.

    python -m bench.online                                   everything (an hour; the costs need an idle machine)
    python -m bench.online --parts overhead --sizes tiny,small
    python -m bench.online --parts models --models bert,lstm --places cpu,sim
    python -m bench.online --parts faults

Every measurement is a process of its own; those of the costs take turns, and the whole round is repeated. Prints tables and
writes `bench/results/online.json`; parts that were not asked for stay in it as they were. Exits with 1 when a
measurement failed. A missed target is a result, not a failure.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.driver import RESULTS, Task, run_parts, run_rounds
from bench.online.table import print_tables

PARTS = ("overhead", "models", "faults")
SIZES, DEVICES = ("tiny", "small", "medium"), ("cpu", "sim")
WAYS = [("cpu", 0, 1), ("cpu", 1, 1), ("cpu-fp64", 0, 1), ("cpu-fp64", 1, 1), ("cpu", 0, 10), ("cpu-fp64", 0, 10)]
"""Reference, workers, every."""
MODELS = ("bert", "llama", "qwen-moe", "vit", "resnet", "lstm")
PLACES = ("cpu", "sim", "sim, other sums")
NUMBERS = ("fp32", "bf16 autocast", "fp16 autocast", "bf16", "fp16")
REFERENCES = ("cpu-fp64", "cpu")


def overhead_tasks(options: argparse.Namespace) -> Iterator[Task]:
    for size in options.sizes:
        for device in options.devices:
            for reference, workers, every in WAYS:
                about = {"size": size, "device": device, "reference": reference, "workers": workers, "every": every}
                arguments = [part for name, value in about.items() for part in (f"--{name}", str(value))]
                yield Task("bench.online.overhead", about, tuple(arguments))


def inner_task(options: argparse.Namespace, part: str, **about: str) -> Task:
    """This file again, for one part of the work."""
    settings = {"numbers": options.numbers, "references": options.references, "faults": options.faults}
    arguments = ["--worker", part]
    for name, value in {**settings, **{f"{key}s": [each] for key, each in about.items()}}.items():
        arguments += [f"--{name}", ";".join(value)] if value else []
    return Task("bench.online", {"part": part, **about}, tuple(arguments))


def measure(part: str, options: argparse.Namespace, work: Path) -> list[dict[str, Any]]:
    """The rows of a part; a row with `error` is a measurement that failed."""
    if part == "overhead":
        return run_rounds(list(overhead_tasks(options)), options, work, options.repeats)
    if part == "models":
        tasks = [
            inner_task(options, part, model=model, place=place) for model in options.models for place in options.places
        ]
    else:
        tasks = [inner_task(options, part)]
    rows = []
    for case in run_rounds(tasks, options, work, 1):
        (result,) = case.pop("rounds")
        rows += [{**case, **result}] if "error" in result else result["rows"]
    return rows


def worker(options: argparse.Namespace) -> None:
    """The work of one process of the parts `models` and `faults`."""
    import torch

    from bench.protocol import print_result
    from tensorprobe import sim

    warnings.simplefilter("ignore")  # of torch and transformers: they are not what is measured
    torch.set_num_threads(options.threads)
    sim.enable("npu")
    if options.worker == "models":
        from bench.online.models import watch_all

        (model,) = options.models
        print_result({"rows": list(watch_all(model, options.places, options.numbers, options.references))})
    else:
        from bench.online.faults import plant

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
    parser.add_argument("--output", type=Path, default=RESULTS / "online.json")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    for name, choices in known.items():
        for unknown in set(getattr(options, name)) - set(choices):
            parser.error(f"--{name}: {unknown!r} is not one of {'; '.join(choices)}")
    return options


def main() -> int:
    options = parse_options()
    if options.worker:
        worker(options)
        return 0
    return run_parts(options, measure, print_tables)


if __name__ == "__main__":
    sys.exit(main())
