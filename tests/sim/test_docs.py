"""docs/sim.md says what the code does: every kind with its parameters, every field, every named fault, every op of
the stand-in.
"""

from __future__ import annotations

from pathlib import Path

from tensorprobe.sim import kinds, npu_ops
from tensorprobe.sim.faults import Fault
from tensorprobe.sim.known_faults import ENTRIES

TEXT = (Path(__file__).parents[2] / "docs" / "sim.md").read_text()


def test_every_kind_and_parameter_is_documented() -> None:
    for kind in kinds.KINDS:
        row = next(line for line in TEXT.splitlines() if line.startswith(f"| `{kind}` |"))
        for name, default in kinds.parameters_of(kind).items():
            assert f"`{name}={default!r}`" in row


def test_every_field_of_a_fault_is_documented() -> None:
    for field in set(Fault.__struct_fields__) - {"params"}:
        assert f"`{field}`" in TEXT


def test_every_named_fault_is_documented_as_it_is() -> None:
    for entry in ENTRIES:
        assert f"| `{entry.name}` | `{entry.model}` | `{entry.fault.op}` | {entry.about} |" in TEXT


def test_every_op_of_the_stand_in_is_documented() -> None:
    for body in npu_ops._SCHEMAS:
        assert f"`{body.__name__}`" in TEXT
