"""The two CSV files: read back by the csv module, with every call in them, and nothing that a spreadsheet would run."""

from __future__ import annotations

import csv
from pathlib import Path

from tensorprobe.model.precheck import Precheck
from tensorprobe.report.precheck_tables import (
    DETAIL_COLUMNS,
    OLDER_COLUMNS,
    detail_rows,
    result_rows,
    write_details,
    write_result,
)
from tests.report.made import HOSTILE
from tests.report.made_precheck import check, checked, failing, precheck, skipped, wrong


def read(path: Path) -> tuple[list[str], list[dict[str, str]]]:
    with path.open(encoding="utf-8", newline="") as file:
        reader = csv.DictReader(file)
        rows = list(reader)
    return list(reader.fieldnames or ()), rows


def results(made: Precheck, folder: Path) -> list[list[str]]:
    write_result(made, folder / "result.csv")
    columns, rows = read(folder / "result.csv")
    assert columns == ["API name", "Forward Test Success", "Backward Test Success", "Message"]
    return [list(row.values()) for row in rows]


def details(made: Precheck, folder: Path) -> dict[str, dict[str, str]]:
    write_details(made, folder / "details.csv")
    columns, rows = read(folder / "details.csv")
    assert tuple(columns) == DETAIL_COLUMNS
    found = {row["Npu Name"]: row for row in rows}
    assert len(found) == len(rows)
    return found


def test_the_columns_of_the_older_tool_come_first() -> None:
    assert DETAIL_COLUMNS[: len(OLDER_COLUMNS)] == OLDER_COLUMNS
    assert (
        tuple(
            "Npu Name,Bench Dtype,NPU Dtype,Shape,Cosine Similarity,Cosine Similarity Message,Max Rel Error,Max Rel Err Message,"
            "Relative Error (dual thousandth),Relative Error (dual thousandth) Message,"
            "Relative Error (dual ten thousandth),Relative Error (dual ten thousandth) Message,"
            "Compare Builtin Type,Builtin Type Message,Pass".split(",")
        )
        == OLDER_COLUMNS
    )


def test_every_call_has_its_row_also_the_equal_ones(tmp_path: Path) -> None:
    made = precheck(
        check("Functional.linear.0.forward", equal=["Functional.linear.1.forward"]),
        failing(),
        skipped(),
        check("Torch.arange.0.forward", backward="skip", details=[checked()]),
    )
    message = "forward output.0: relative_l2 0.031, allowed 2e-07"
    assert results(made, tmp_path) == [
        ["Functional.linear.0", "True", "True", ""],
        ["Functional.linear.1", "True", "True", ""],
        ["Functional.softmax.0", "False", "True", message],
        ["Torch.empty.0", "SKIP", "SKIP", "empty returns memory that is not initialised"],
        ["Torch.arange.0", "True", "", ""],
    ]


def test_a_backward_that_was_tried_in_vain_is_skipped(tmp_path: Path) -> None:
    refused = checked(direction="backward", slot="", result="skip", message="the reference has no backward: …")
    made = precheck(
        check("Torch.foo.0.forward", backward="skip", message=refused.message, details=[checked(), refused])
    )
    assert results(made, tmp_path) == [["Torch.foo.0", "True", "SKIP", "the reference has no backward: …"]]
    row = details(made, tmp_path)["Torch.foo.0.backward"]
    assert (row["Pass"], row["Message"], row["Cosine Similarity"]) == ("SKIP", refused.message, "")


def test_figures_stand_in_their_columns(tmp_path: Path) -> None:
    cosine = wrong(judged_by="one_minus_cosine", one_minus_cosine=0.25, measured=0.25, allowed=0.01, within_1e3=0.5)
    rows = details(precheck(failing(details=[cosine, checked(direction="backward", slot="output.1")])), tmp_path)
    row = rows["Functional.softmax.0.forward.output.0"]
    assert [row[name] for name in OLDER_COLUMNS] == [
        "Functional.softmax.0.forward.output.0", "torch.float64", "torch.float32", "[8, 16]",
        "0.75", "1 - cosine 2.5e-01, allowed 0.01", "3e-08", "", "0.5", "", "1.0", "", "", "", "False",
    ]  # fmt: skip
    assert (row["Judged By"], row["Measured"], row["Allowed"]) == ("one_minus_cosine", "0.25", "0.01")
    assert (row["Module"], row["Source"], row["Step"], row["Data"]) == ("layers.0.attn", "model.py:88", "0", "random")
    assert rows["Functional.softmax.0.backward.output.1"]["Pass"] == "True"


def test_equal_calls_say_what_stands_for_them(tmp_path: Path) -> None:
    rows = details(precheck(check(equal=["Functional.softmax.1.forward"])), tmp_path)
    assert {name: row["Checked As"] for name, row in rows.items()} == {
        "Functional.softmax.0.forward.output.0": "",
        "Functional.softmax.0.backward.output.0": "",
        "Functional.softmax.1.forward.output.0": "Functional.softmax.0.forward",
        "Functional.softmax.1.backward.output.0": "Functional.softmax.0.forward",
    }


def test_calls_without_figures_have_a_row(tmp_path: Path) -> None:
    dead = failing(details=[], message="did not end within 60 s", backward="skip")
    raised = wrong(slot="", judged_by="raised", message="it raised on npu: RuntimeError")
    rows = details(precheck(dead, skipped(), failing("Torch.exp.0.forward", details=[raised])), tmp_path)
    assert [(name, row["Pass"], row["Message"], row["Max Rel Error"]) for name, row in rows.items()] == [
        ("Functional.softmax.0.forward", "False", "did not end within 60 s", ""),
        ("Torch.empty.0.forward", "SKIP", "empty returns memory that is not initialised", ""),
        ("Torch.exp.0.forward", "False", "it raised on npu: RuntimeError", ""),
    ]


def test_with_several_ranks_every_name_says_its_own(tmp_path: Path) -> None:
    made = precheck(check(equal=["Functional.softmax.0.forward (step 0, rank 1)"]), skipped(rank=1))
    assert [row[0] for row in results(made, tmp_path)] == [
        "Functional.softmax.0 (step 0, rank 0)",
        "Functional.softmax.0 (step 0, rank 1)",
        "Torch.empty.0 (step 0, rank 1)",
    ]


def test_a_name_runs_no_formula_and_breaks_no_line(tmp_path: Path) -> None:
    made = precheck(failing(HOSTILE, message=HOSTILE, module="-1+1", details=[]), skipped(message="\uff1d1"))
    rows = [*results(made, tmp_path), *(list(row.values()) for row in details(made, tmp_path).values())]
    for row in rows:
        for cell in row:
            assert cell[:1] not in ("=", "+", "-", "@", "\uff1d")
            assert cell.isprintable()
    assert len((tmp_path / "result.csv").read_text(encoding="utf-8").splitlines()) == 3
    assert any(cell == "'-1+1" for row in rows for cell in row)


def test_numbers_are_left_alone(tmp_path: Path) -> None:
    row = details(precheck(check(details=[checked(max_rel=-1.5, measured=float("inf"))])), tmp_path)
    assert row["Functional.softmax.0.forward.output.0"]["Max Rel Error"] == "-1.5"
    assert row["Functional.softmax.0.forward.output.0"]["Measured"] == "inf"


def test_names_can_be_spelled_otherwise() -> None:
    made = precheck(check("Functional.conv2d.1.forward", details=[checked()]))
    spell = {"Functional.conv2d.1.forward": "Functional*conv2d*1"}.__getitem__
    assert [row[0] for row in result_rows(made, spell=spell)] == ["Functional*conv2d*1"]
    assert [row[0] for row in detail_rows(made, spell=spell)] == ["Functional*conv2d*1.forward.output.0"]


def test_a_row_of_random_numbers_has_only_the_figure_that_decided(tmp_path: Path) -> None:
    drawn = checked(judged_by="share of zeros, in standard errors", measured=1.5, allowed=6.0, compared=False)
    placed = wrong(slot="output.1", place=[3, 1])
    rows = details(precheck(check(details=[drawn, placed])), tmp_path)
    first, second = rows.values()
    assert (first["Measured"], first["Cosine Similarity"], first["Relative L2"], first["Worst At"]) == (
        "1.5",
        "",
        "",
        "",
    )
    assert (second["Cosine Similarity"] != "", second["Worst At"]) == (True, "[3, 1]")
