"""What is suggested for a call without a partner, and what is said when nothing has one."""

from __future__ import annotations

import pytest

from tensorprobe.pairing.align import Detail, Suggestion
from tensorprobe.pairing.nearest import Suggestions, nothing_paired_hint, op_similarity

from .call_sequences import Made, Recorded, align, record, transformer


def suggestion(baseline: Recorded, candidate: Recorded, side: str, name: str) -> Suggestion | None:
    """What is suggested for the unpaired call of that name."""
    details: dict[str, list[Detail]] = {"baseline": baseline.details, "candidate": candidate.details}
    own = baseline if side == "baseline" else candidate
    (position,) = [row for row, entry in enumerate(own.entries) if entry.name == name]
    alignment = align(baseline, candidate)
    sides = baseline.entries, candidate.entries
    found = Suggestions(alignment, *sides, details.__getitem__).nearest(side, position)
    assert found == Suggestions(alignment, *sides, details.__getitem__).nearest(side, position)
    return found


def replaced(calls: list[Made], old: str, **changes: str) -> list[Made]:
    """The calls with the first call of an op changed."""
    place = next(place for place, call in enumerate(calls) if call.op == old)
    return [*calls[:place], calls[place]._replace(**changes), *calls[place + 1 :]]


@pytest.mark.parametrize("side", ["baseline", "candidate"])
def test_a_fused_op_in_the_same_module_is_suggested(side: str) -> None:
    ours, theirs = transformer(), replaced(transformer(), "Functional.gelu", op="NPU.npu_gelu")
    theirs = replaced(theirs, "Functional.softmax", op="NPU.npu_scaled_masked_softmax")
    names = {"baseline": "Functional.gelu.0.forward", "candidate": "NPU.npu_gelu.0.forward"}
    runs = record(ours), record(theirs)
    found = suggestion(*runs, side, names[side])
    assert found is not None
    # One gelu is missing: the calls of the others in their modules are paired, whatever their numbers.
    other = runs[side == "baseline"].entries[found.position].name
    assert other == names["candidate" if side == "baseline" else "baseline"]
    assert (found.reason, found.is_paired) == ("same module, similar op", False)


def test_the_direction_must_agree() -> None:
    runs = record(transformer()), record(replaced(transformer(), "Functional.gelu", op="NPU.npu_gelu"))
    found = suggestion(*runs, "candidate", "NPU.npu_gelu.0.backward")
    assert found is not None
    assert runs[0].entries[found.position].name == "Functional.gelu.0.backward"


def test_another_op_at_the_same_place_is_suggested() -> None:
    runs = record(transformer()), record(replaced(transformer(), "Functional.gelu", op="Functional.hardtanh"))
    found = suggestion(*runs, "candidate", "Functional.hardtanh.0.forward")
    assert found is not None
    assert found.reason == "same position in the same module"
    assert runs[0].entries[found.position].name == "Functional.gelu.0.forward"


def test_the_same_op_nearby_is_suggested() -> None:
    calls = [Made(f"Tensor.{op}", "a", (), op) for op in ("add", "mul", "div", "sub", "exp")]
    moved = [
        calls[0],
        *calls[2:4],
        calls[1]._replace(module="b", identity="moved"),
        calls[4],
        Made("Tensor.mul", "c", (), 9),
    ]
    found = suggestion(record(calls), record(moved), "baseline", "Tensor.mul.0.forward")
    assert found is not None
    assert (found.position, found.reason) == (3, "same op nearby")


def test_a_call_that_has_another_partner_is_named_as_such() -> None:
    calls = [Made("Tensor.add", "a", (), 0), Made("Tensor.add", "a", (), 1)]
    found = suggestion(record(calls), record(calls[:1]), "baseline", "Tensor.add.1.forward")
    assert found == Suggestion(0, "same op nearby, with another partner", True)


def test_nothing_is_suggested_for_what_is_like_nothing() -> None:
    calls = transformer()
    stranger = Made("Torch.fft.rfft", "elsewhere", (), "new")
    runs = record(calls), record([*calls[:9], stranger, *calls[9:]])
    assert suggestion(*runs, "candidate", "Torch.fft.rfft.0.forward") is None


def test_similarity_looks_at_the_op_and_not_at_its_family() -> None:
    assert op_similarity("Functional.silu", "Functional.silu") == 1
    assert op_similarity("Functional.silu", "NPU.npu_silu") > 0.9
    assert op_similarity("Functional.silu", "Functional.cross_entropy") < 0.5


MODULES = ["Module.layers.0.attn.Attention.forward.0", "Module.layers.1.mlp.MLP.forward.0", "Module.GPT.forward.0"]


@pytest.mark.parametrize(
    ("baseline", "candidate", "hint"),
    [
        (
            [name.replace("Module.", "Module.module.") for name in MODULES[:2]],
            MODULES,
            "Baseline names start with 'module.layers', candidate names with 'layers'. "
            "One side looks wrapped (DDP). Try --strip-prefix module.",
        ),
        (
            MODULES,
            [name.replace("Module.", "Module.model._orig_mod.") for name in MODULES[:2]],
            "Baseline names start with 'layers', candidate names with 'model._orig_mod.layers'. "
            "One side looks wrapped (torch.compile). Try --strip-prefix model._orig_mod.",
        ),
        (
            ["Functional.linear.0.forward"],
            ["Aten.mm.default.0.forward"],
            "The baseline was captured at level api, the candidate at level aten. Capture both with the same --level.",
        ),
        (
            ["Tensor.add.0.forward"],
            ["Tensor.add.0.backward"],
            "The baseline holds only forward calls, the candidate only backward calls.",
        ),
        ([], ["Tensor.add.0.forward"], "The baseline holds no calls."),
        (["Tensor.add.0.forward"], [], "The candidate holds no calls."),
        (
            ["Tensor.add.0.forward"],
            ["conv1_out", "conv2_out"],
            "The candidate's names, such as 'conv1_out', are not call names such as 'Functional.conv2d.0.forward'.",
        ),
        (
            ["Tensor.add.0.forward", "Tensor.add.1.forward"],
            ["Torch.add.0.forward"],
            "Baseline names start with 'Tensor.add.0.forward', 'Tensor.add.1.forward'; candidate names with "
            "'Torch.add.0.forward'. If you know which names belong together, pass them with --map.",
        ),
    ],
)
def test_hint_when_nothing_is_paired(baseline: list[str], candidate: list[str], hint: str) -> None:
    assert nothing_paired_hint(baseline, candidate) == hint
