"""An audit judges a collective by what all ranks recorded of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy
import pytest

import tensorprobe
from tests.builders.runs import Blob, slot, write_calls, write_manifest, write_rank

SENT = [numpy.random.default_rng(rank).standard_normal((4, 6)).astype("float32") for rank in range(2)]
TOTAL = SENT[0] + SENT[1]
Made = tuple[Any, Any]
"""What each rank receives."""
RIGHT: dict[str, Made] = {
    "all_reduce": (TOTAL, TOTAL),
    "all_reduce of the mean": (TOTAL / 2, TOTAL / 2),
    "all_reduce of the maximum": (numpy.maximum(*SENT), numpy.maximum(*SENT)),
    "broadcast": (SENT[1], SENT[1]),
    "reduce_scatter_tensor": (TOTAL[:2], TOTAL[2:]),
    "all_gather_into_tensor": (numpy.concatenate(SENT), numpy.concatenate(SENT)),
    "all_to_all_single": tuple(numpy.concatenate([part[at : at + 2] for part in SENT]) for at in (0, 2)),
}


def write(root: Path, how: str, made: Made, *, world: int = 2, **kwargs: Any) -> Path:
    name = how.split()[0]
    write_manifest(root, world_size=world)
    for rank, received in enumerate(made):
        blob = Blob()
        given = "input.0" if name in ("all_reduce", "broadcast") else "input.1"
        values = {given: SENT[rank], "output.0": numpy.ascontiguousarray(received)}
        call = {
            "name": f"Distributed.{name}.0.forward",
            "args": [{"slot": given}],
            "kwargs": {"src": 1, "group": None, **kwargs},
            "slots": [slot(at, "float32", list(each.shape), each.tobytes(), blob) for at, each in values.items()],
        }
        (write_calls(root, [call], rank=rank) / "tensors.bin").write_bytes(blob.content)
        write_rank(root, rank)
    return root


@pytest.mark.parametrize("how", RIGHT)
def test_a_collective_is_right_or_wrong_by_the_ranks_own_records(tmp_path: Path, how: str) -> None:
    right = tensorprobe.audit(write(tmp_path / "right", how, RIGHT[how]), jobs=0)
    assert right.exit_code == 0 and right.summary.passed == 2, str(right)
    spoiled = RIGHT[how][1].copy()
    spoiled[1, 2] *= 1.00001
    wrong = tensorprobe.audit(write(tmp_path / "wrong", how, (RIGHT[how][0], spoiled)), jobs=0)
    assert [(check.rank, check.forward) for check in wrong.failures] == [(1, "fail")]
    assert "Distributed." in str(wrong).splitlines()[0]


def test_a_collective_that_cannot_be_judged_is_skipped_with_the_reason(tmp_path: Path) -> None:
    made = RIGHT["all_reduce"]
    missing = tensorprobe.audit(write(tmp_path / "a", "all_reduce", made, world=4), jobs=0)
    assert missing.exit_code == 2 and "of 4 ranks only 2 were recorded" in str(missing)
    group = {"type": "object", "value": "torch.distributed.distributed_c10d.ProcessGroup"}
    grouped = tensorprobe.audit(write(tmp_path / "b", "all_reduce", made, group=group), jobs=0)
    assert grouped.exit_code == 2 and "in a group of ranks" in str(grouped)
    unknown = tensorprobe.audit(write(tmp_path / "c", "gather", made), jobs=0)
    assert unknown.exit_code == 2 and "no definition of the collective gather" in str(unknown)


def _asked(kind: str) -> dict[str, str]:
    return {"type": "torch.distributed.ReduceOp", "value": kind}


def test_a_sum_in_place_of_a_mean_is_found_by_audit_and_by_compare(tmp_path: Path) -> None:
    mean, total = RIGHT["all_reduce of the mean"], RIGHT["all_reduce"]
    right = write(tmp_path / "right", "all_reduce", mean, op=_asked("AVG"))
    wrong = write(tmp_path / "wrong", "all_reduce", total, op=_asked("AVG"))
    assert tensorprobe.audit(right, jobs=0).exit_code == 0
    found = tensorprobe.audit(wrong, jobs=0)
    assert [check.forward for check in found.failures] == ["fail", "fail"]
    assert "is not the AVG of the ranks' inputs but their SUM" in found.failures[0].details[0].message
    compared = tensorprobe.compare(right, wrong).divergence
    assert compared is not None and compared.status == "introduced" and "all_reduce" in compared.call

    other = write(tmp_path / "other", "all_reduce", total, op=_asked("SUM"))
    assert tensorprobe.audit(other, jobs=0).exit_code == 0
    asked = tensorprobe.compare(right, other).divergence
    assert asked is not None and asked.finding is not None and "'AVG' → 'SUM'" in asked.finding.detail
    older = {"type": "object", "value": "torch._C._distributed_c10d.ReduceOp.RedOpType"}
    assert tensorprobe.compare(right, write(tmp_path / "old", "all_reduce", mean, op=older)).exit_code == 0
    xor = tensorprobe.audit(write(tmp_path / "xor", "all_reduce", total, op=_asked("BXOR")), jobs=0)
    assert xor.exit_code == 2 and "no definition of the reduction BXOR" in str(xor)
