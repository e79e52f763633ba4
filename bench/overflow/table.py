"""What the overflow benchmark says of its raw results: planted overflows, alarms, ratios, targets. Prints them; measures nothing."""

from __future__ import annotations

import statistics

from rich.table import Table

from bench.tables import Row, Target, print_parts, table

COST_TARGETS = {"tiny": 1.8, "medium": 1.05}
"""How long a watched step may be, in plain steps."""


def print_tables(measured: dict[str, list[Row]]) -> None:
    """The figures of the parts that were measured, and the targets."""
    print_parts({"planted": planted, "clean": clean, "overhead": overhead}, measured)


def planted(rows: list[Row]) -> tuple[list[Table], list[Target]]:
    """A line for each program."""
    lines, targets = [], []
    for row in rows:
        if "expected" not in row:
            lines.append([row["place"], row["error"]])
            continue
        said = "exactly" if row["exact"] else "; ".join(row["told"]) or "nothing"
        lines.append([row["place"], row["name"], "; ".join(row["expected"]) or "nothing", said, row["error"]])
    for place in dict.fromkeys(row["place"] for row in rows):
        mine = [row for row in rows if row["place"] == place and "expected" in row]
        exact, missed, false = (sum(bool(row[key]) for row in mine) for key in ("exact", "missed", "false"))
        figure = f"{exact} of {len(mine)}: {missed} with something missed, {false} with something false"
        targets.append((f"programs told exactly, {place}", "all", figure, bool(mine) and exact == len(mine)))
    return [table("Planted overflows", ["where", "program", "expected", "told", "error"], lines)], targets


def clean(rows: list[Row]) -> tuple[list[Table], list[Target]]:
    """A line for each training without a NaN or inf."""
    lines = []
    for row in rows:
        if "told" not in row:
            lines.append([row["model"], row["error"]])
            continue
        meant = ", ".join(f"{op} {count}" for op, count in row["intended"].items())
        bits = "CHANGED" if row["changed_training"] else "same bits"
        counts = [f"{row['calls']:,}", str(row["skipped"])]
        lines.append([row["model"], row["numbers"], *counts, meant, "; ".join(row["told"]) or "nothing", bits])
    false = sum(len(row.get("told", ())) for row in rows)
    changed = sum(row.get("changed_training", False) for row in rows)
    columns = ["model", "numbers", "calls", "skipped by the scaler", "infinities on purpose", "told", "training"]
    targets = [("false alarms in clean trainings", "0", str(false), not false)]
    targets.append(("trainings changed by the watch", "0", str(changed), not changed))
    return [table("Clean trainings", columns, lines)], targets


def overhead(rows: list[Row]) -> tuple[list[Table], list[Target]]:
    """A line for each size; a ratio is taken within one process, of a plain and a watched turn."""
    lines, targets = [], []
    for size in dict.fromkeys(row["size"] for row in rows):
        good = [row for row in rows if row["size"] == size and "ratios" in row]
        if not good:
            lines.append([size, next(row["error"] for row in rows if row["size"] == size)])
            continue
        ratios = [ratio for row in good for ratio in row["ratios"]]
        middle = statistics.median(ratios)
        times = [statistics.median(row[key] for row in good) for key in ("plain_s", "watched_s", "start_and_stop_s")]
        told = [f"{1000 * seconds:.2f}" for seconds in times]
        spread = f"{middle:.2f} ({min(ratios):.2f}-{max(ratios):.2f})"
        lines.append([size, spread, *told, f"{good[0]['calls_in_a_step']:,}"])
        if size in COST_TARGETS:
            limit = COST_TARGETS[size]
            targets.append((f"watched step of the {size} GPT", f"≤ {limit}", f"{middle:.2f}", middle <= limit))
    columns = ["GPT", "watched / plain", "plain ms", "watched ms", "start and stop ms", "calls in a step"]
    return [table("A watched training step", columns, lines)], targets
