"""`ptdbg_ascend.compare_distributed`: ranks meet by their number, each pair has its table, the rank that fails is named."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tensorprobe.errors import CannotCompare, SettingsError
from tensorprobe.legacy.compared import comparing
from tensorprobe.legacy.ptdbg.compare import compare_distributed
from tests.compat.reading import read_csv
from tests.compat.tiny_net import CONV, RELU, STACK, VERDICT, Tensors, X, failing, tensors, write

FAULT = {f"{RELU}_output": -X}


@pytest.fixture(autouse=True)
def output() -> Path:
    Path("output").mkdir()
    return Path("output")


def dump(folder: str, ranks: Sequence[int], changed: dict[int, Tensors] | None = None, **more: Any) -> str:
    """A dump with these ranks; `changed` has other tensors for some of them."""
    for rank in ranks:
        held = {**tensors(), **(changed or {}).get(rank, {})}
        write(Path(folder, f"rank{rank}", "myDump.pkl"), held, **more)
    return folder


def test_the_rank_of_a_planted_fault_is_named(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    npu, bench = dump("npu_v1.0", range(4), {2: FAULT}), dump("bench_v1.0", range(4))
    paths = compare_distributed(npu, bench, "./output")
    assert [path.name.rpartition("_")[0] for path in paths] == [f"compare_result_rank{n}-rank{n}" for n in range(4)]
    assert [failing(read_csv(path)) for path in paths] == [[], [], [f"{RELU}_output"], []]
    assert {path.stem.rpartition("_")[2] for path in paths} == {paths[0].stem.rpartition("_")[2]}
    stamp = paths[0].stem.rpartition("_")[2]
    nodes = [Path(f"output/advisor_rank{n}-rank{n}_{stamp}.txt").read_text().splitlines()[1] for n in range(4)]
    assert nodes == ["Suspect Nodes: NA"] * 2 + [f"Suspect Nodes: {RELU}_output", "Suspect Nodes: NA"]
    assert (
        f"1 of 4 ranks have rows that are 'No', the earliest first: rank2-rank2 (line 6: {RELU}_output)" in caplog.text
    )
    assert "DIVERGED first at step 0, rank 2" in caplog.text
    assert "tensorprobe compare bench_v1.0 npu_v1.0" in caplog.text


def test_ranks_are_in_the_order_of_their_numbers(caplog: pytest.LogCaptureFixture) -> None:
    ranks = [10, 2, 0]
    npu = dump("npu", ranks, {10: {f"{CONV}_output": -X}, 2: FAULT})
    paths = compare_distributed(npu, dump("bench", ranks), "output", suffix="_mine")
    assert [path.name.rpartition("_")[0].removeprefix("compare_result_mine_") for path in paths] == [
        "rank0-rank0",
        "rank2-rank2",
        "rank10-rank10",
    ]
    assert [failing(read_csv(path)) for path in paths] == [[], [f"{RELU}_output"], [f"{CONV}_output"]]
    assert "rank10-rank10 (line 4" in caplog.text.partition("the earliest first: ")[2][:30]


def test_the_number_of_jobs_changes_no_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparing.time, "strftime", lambda _: "20230104132544")
    npu, bench = dump("npu", range(3), {1: FAULT}), dump("bench", range(3))
    written = []
    for jobs in (1, 2):
        folder = Path(f"jobs{jobs}")
        folder.mkdir()
        compare_distributed(npu, bench, folder, jobs=jobs)
        written.append({file.name: file.read_bytes() for file in folder.iterdir()})
    assert len(written[0]) == 6
    assert written[0] == written[1]


def test_a_call_that_a_rank_lacks_is_listed() -> None:
    npu, bench = dump("npu", [0]), dump("bench", [0])
    write(Path("npu/rank1/myDump.pkl"), {f"{CONV}_output": X + 1})
    write(Path("bench/rank1/myDump.pkl"), tensors())
    whole, part = (read_csv(path) for path in compare_distributed(npu, bench, "output"))
    assert {row[VERDICT] for row in whole} == {"Yes"}
    assert [row[VERDICT] for row in part].count("Unmatched") == len(tensors())
    assert [row["Bench Name"] for row in part] == list(tensors())


def test_the_keywords_are_those_of_compare(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    for side in ("npu", "bench"):
        write(Path(side, "rank0/api_stack_myDump.pkl"), tensors(), {CONV: STACK})
    with pytest.raises(SettingsError, match="please turn on the stack_mode"):
        compare_distributed("npu", "bench", "output")
    (path,) = compare_distributed(
        "npu",
        "bench",
        "output",
        shape_flag=True,
        stack_mode=True,
        auto_analyze=False,
        fuzzy_match=True,
        is_print_compare_log=True,
    )
    assert "net.py:12" in read_csv(path)[0]["NPU_Stack_Info"]
    assert [*Path("output").glob("advisor*")] == []
    assert f"[rank0-rank0] [{RELU}_output] Cosine" in caplog.text


def test_stack_mode_is_checked_for_every_rank() -> None:
    npu, bench = dump("npu", [0]), dump("bench", [0])
    write(Path("npu/rank1/api_stack_myDump.pkl"), tensors())
    write(Path("bench/rank1/api_stack_myDump.pkl"), tensors())
    with pytest.raises(SettingsError, match=r"(?s)please turn on the stack_mode.*rank1/api_stack_myDump"):
        compare_distributed(npu, bench, "output")


def test_other_ranks_are_an_error() -> None:
    bench = dump("bench", [0, 1])
    with pytest.raises(CannotCompare) as raised:
        compare_distributed(dump("npu", [0, 2, 3]), bench, "output")
    for words in (
        "'npu' has 3 (rank 0, 2-3)",
        "'bench' has 2 (rank 0-1)",
        "only in the NPU dump: rank 2-3",
        "only in the bench dump: rank 1",
    ):
        assert words in str(raised.value)
    assert [*Path("output").iterdir()] == []


def test_foreign_files_are_named() -> None:
    npu, bench = dump("npu", [0]), dump("bench", [0])
    Path("npu/notes.txt").write_text("")
    Path("npu/rank01").mkdir()
    with pytest.raises(SettingsError, match=r"npu_dump_dir 'npu' holds what is no rank's folder: notes.txt, rank01"):
        compare_distributed(npu, bench, "output")


def test_a_file_named_like_a_rank_is_foreign() -> None:
    npu, bench = dump("npu", [0]), dump("bench", [0])
    Path("bench/rank1").write_text("")
    with pytest.raises(SettingsError, match=r"bench_dump_dir 'bench' holds what is no rank's folder: rank1"):
        compare_distributed(npu, bench, "output")


def test_the_folder_above_is_recognised() -> None:
    dump("npu/tag_v1.0", [0])
    with pytest.raises(SettingsError, match=r"(?s)tag_v1\.0.*Pass it: npu/tag_v1\.0"):
        compare_distributed("npu", dump("bench", [0]), "output")


def test_a_run_of_tensorprobe_is_told_where_to_go() -> None:
    Path("npu").mkdir()
    Path("npu/manifest.json").write_text("{}")
    with pytest.raises(SettingsError, match="tensorprobe compare BENCH NPU"):
        compare_distributed("npu", dump("bench", [0]), "output")


def test_a_rank_has_one_pkl() -> None:
    npu, bench = dump("npu", [0]), dump("bench", [0])
    write(Path("npu/rank0/other.pkl"), tensors())
    with pytest.raises(SettingsError, match=r"'npu/rank0' holds 2 pkl files: myDump.pkl, other.pkl"):
        compare_distributed(npu, bench, "output")
    for file in Path("npu/rank0").glob("*.pkl"):
        file.unlink()
    with pytest.raises(SettingsError, match=r"no pkl in 'npu/rank0'\. It holds myDump, other"):
        compare_distributed(npu, bench, "output")


@pytest.mark.parametrize(
    ("npu", "words"),
    [
        ("nowhere", "npu_dump_dir 'nowhere' does not exist"),
        ("bench/rank0/myDump.pkl", "is a file"),
        ("empty", "npu_dump_dir 'empty' is empty"),
        (None, "npu_dump_dir is None"),
    ],
)
def test_a_wrong_folder_is_told(npu: Any, words: str) -> None:
    Path("empty").mkdir()
    bench = dump("bench", [0])
    with pytest.raises(SettingsError) as raised:
        compare_distributed(npu, bench, "output")
    assert words in str(raised.value)


def test_the_output_folder_must_exist() -> None:
    with pytest.raises(SettingsError, match="mkdir -p nowhere"):
        compare_distributed("npu", "bench", "nowhere")
    with pytest.raises(SettingsError, match="jobs is 0"):
        compare_distributed(dump("npu", [0]), dump("bench", [0]), "output", jobs=0)
