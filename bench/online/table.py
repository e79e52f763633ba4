"""What the online benchmark says of its raw results: ratios, shares, finds, alarms, targets. Prints them; measures nothing."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from rich.table import Table

from bench.tables import Row, Target, print_parts, table

COST_TARGETS = {
    ("cpu-fp64", 1): (3.5, 2.5),
    ("cpu", 1): (2.0, 2.0),
    ("cpu-fp64", 10): (1.2, 1.2),
    ("cpu", 10): (1.2, 1.2),
}
"""(reference, every) → how long a watched step of the small GPT may be, in plain steps: without workers, and with one."""
SHARE_TARGET = 0.97
SHOWN_FAILURES = 30


def print_tables(measured: dict[str, list[Row]]) -> None:
    """The figures of the parts that were measured, and the targets."""
    print_parts({"overhead": overhead, "models": models, "faults": faults}, measured)


def overhead(rows: list[Row]) -> tuple[list[Table], list[Target]]:
    """A line for each setting; a ratio is taken within one process, of a plain and a watched turn."""
    lines, targets = [], []
    for row in rows:
        good = [result for result in row["rounds"] if "error" not in result]
        name = [row["size"], row["device"], row["reference"], str(row["workers"]), str(row["every"])]
        if not good:
            lines.append([*name, row["rounds"][0]["error"]])
            continue
        ratios = [ratio for result in good for ratio in result["ratios"]]
        middle = statistics.median(ratios)
        plain, watched = (statistics.median(result[key] for result in good) for key in ("plain_s", "watched_s"))
        counts = f"{good[0]['compared']:,} of {good[0]['seen']:,}"
        times = [f"{middle:.2f} ({min(ratios):.2f}-{max(ratios):.2f})", f"{plain:.4f}", f"{watched:.4f}"]
        lines.append([*name, *times, counts, str(max(result["failed"] for result in good))])
        limits = COST_TARGETS.get((row["reference"], row["every"]))
        if row["size"] == "small" and limits is not None:
            limit = limits[min(int(row["workers"]), 1)]
            label = f"small GPT on {row['device']}, {row['reference']}, {row['workers']} workers, every {row['every']}"
            targets.append((label, f"≤ {limit}x", f"{middle:.2f}x", middle <= limit))
    columns = ["GPT", "device", "reference", "workers", "every", "watched / plain", "plain s", "watched s"]
    return [table("A watched training step", [*columns, "calls compared", "failed"], lines)], targets


def models(rows: list[Row]) -> tuple[list[Table], list[Target]]:
    """A line for each clean training, then every reason for not comparing, then every alarm."""
    lines, skips, alarms, targets = [], [], [], []
    for row in rows:
        name = [row["model"], row["place"], row.get("numbers", ""), row.get("reference", "")]
        if "error" in row or "note" in row:
            lines.append([*name, str(row.get("error", row.get("note")))])
        if "compared" not in row:
            continue
        counts = [f"{row['compared']:,} of {row['seen']:,}", f"{row['share']:.1%}", f"{row['share_of_computing']:.1%}"]
        lines.append([*name, *counts, str(row["failed"]), "CHANGED" if row["changed_training"] else "same bits"])
        if row["numbers"] == "fp32" and row["reference"] == "cpu-fp64":
            skips += [[*name[:2], op, str(count)] for op, count in row["not_compared"].items()]
            label = f"{row['model']} on {row['place']}: calls that compute and are compared"
            share = row["share_of_computing"]
            targets.append((label, f"≥ {SHARE_TARGET:.0%}", f"{share:.1%}", share >= SHARE_TARGET))
        alarms += [[" ".join(name), *_failure(failure)] for failure in row["failures"]]
    failed = sum(row.get("failed", 0) for row in rows)
    changed = sum(row.get("changed_training", False) for row in rows)
    targets.append(("false alarms in clean trainings", "0", str(failed), not failed))
    targets.append(("trainings changed by the watch", "0", str(changed), not changed))
    columns = ["model", "on", "numbers", "reference", "compared", "of non-view, non-random", "of computing", "failed"]
    tables = [table("Clean trainings", [*columns, "training"], lines)]
    tables.append(table("Not compared (fp32), but views and random ops", ["model", "on", "op: reason", "calls"], skips))
    if alarms:
        tables.append(table("False alarms", ["where", "call", "kind", "judged"], alarms[:SHOWN_FAILURES]))
    return tables, targets


def faults(rows: list[Row]) -> tuple[list[Table], list[Target]]:
    """A line for each fault that is not named exactly or comes with other alarms, and the counts."""
    lines, targets = [], []
    for row in rows:
        told = [row["expected"], _roundings(row)] if row.get("expected") else ["", ""]
        if row.get("error"):
            lines.append([row.get("fault", ""), row.get("reference", ""), *told, row["error"], ""])
        elif row["note"]:
            lines.append([row["fault"], row["reference"], *told, f"not counted: {row['note']}", ""])
        elif row["named"] != row["expected"] or row["elsewhere"] or row["changed_training"]:
            changed = " training changed" if row["changed_training"] else ""
            lines.append(
                [row["fault"], row["reference"], *told, row["named"] or "MISSED", f"{row['elsewhere']}{changed}"]
            )
    for reference in dict.fromkeys(row["reference"] for row in rows if row.get("reference")):
        mine = [row for row in rows if row.get("reference") == reference and not row["note"]]
        exact = sum(row["named"] == row["expected"] for row in mine)
        others = sum(len(row["elsewhere"]) for row in mine)
        targets.append((f"faults named exactly, {reference}", "all", f"{exact} of {len(mine)}", exact == len(mine)))
        targets.append((f"alarms beside the fault, {reference}", "0", str(others), not others))
    columns = ["fault", "reference", "first faulty call", "roundings", "named", "other alarms"]
    return [table("Planted faults: all that is not plainly right", columns, lines)], targets


def _failure(failure: Row) -> Iterator[str]:
    yield f"{failure['step']}:{failure['call']} {failure['slot']}"
    yield f"{failure['dtype']}{failure['shape']} against {failure['reference']}"
    yield failure["message"] or f"{failure['judged_by']} {failure['measured']:.3g}, allowed {failure['allowed']:.3g}"


def _roundings(row: Row) -> str:
    return f"{row['roundings']:.3g}" if row["roundings"] is not None else "∞"
