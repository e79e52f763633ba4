"""Optimizers that are written with different calls."""

from __future__ import annotations

from msgspec.structs import replace

from tensorprobe.model import Call, Slot
from tensorprobe.pairing.call_pairs import OPTIMIZER as PHASE
from tensorprobe.pairing.optimizers import pair_optimizers

NAME = "Optimizer.step.0.forward"


def update(op: str, *roles: str) -> Call:
    """A call in the step of an optimizer that changes these tensors."""
    slots = [
        Slot(name=f"{side}.0.{at}", dtype="float32", shape=(2,), role=role, digest=f"{side} {role}")
        for at, role in enumerate(roles)
        for side in ("input", "output")
    ]
    return Call(name=f"{op}.0.forward", phase=PHASE, slots=tuple(slots))


def test_an_update_of_all_parameters_at_once_meets_updates_of_each() -> None:
    baseline = [update("Torch._foreach_add_", "parameter a", "parameter b")]
    candidate = [update("Tensor.add_", "parameter a"), update("Tensor.add_", "parameter b")]
    region = pair_optimizers((baseline, candidate), [], ([0], [0, 1]), NAME)
    assert region is not None and len(region.parts) == 2 and region.members == ([0], [0, 1])


def test_a_call_that_also_updates_what_only_one_side_has_makes_no_region() -> None:
    baseline = [update("Torch._foreach_add_", "parameter a", "parameter b")]
    candidate = [update("Tensor.add_", "parameter a")]
    assert pair_optimizers((baseline, candidate), [], ([0], [0]), NAME) is None
    assert pair_optimizers((candidate, baseline), [], ([0], [0]), NAME) is None


def test_a_state_that_is_replaced_on_one_side_is_compared_where_it_is_read_again() -> None:
    """The other side writes to it in place, and the record does not know the new tensor by its name."""
    baseline = [update("Tensor.mul_", "optimizer state m of a"), update("Tensor.add_", "parameter a")]
    read = Slot(name="input.0", dtype="float32", shape=(2,), role="optimizer state m of a", digest="m")
    made = Slot(name="output.0", dtype="float32", shape=(2,), digest="n")
    replaces = Call(name="Tensor.mul.0.forward", phase=PHASE, slots=(read, made))
    uses = Call(
        name="Tensor.div.0.forward", phase=PHASE, slots=(replace(made, name="input.0"), replace(made, digest="u"))
    )
    adds = update("Tensor.add_", "parameter a")
    adds = replace(adds, slots=(*adds.slots, replace(made, name="input.1", digest="u")))
    region = pair_optimizers((baseline, [replaces, uses, adds]), [], ([0, 1], [0, 1, 2]), NAME)
    assert region is not None and region.members == ([0, 1], [0, 1, 2])
    assert [slot.name for slot in region.parts[0][0].slots] == [
        "input.optimizer state m of a", "input.parameter a", "output.parameter a"
    ]  # fmt: skip


STEP = "optimizer state step of a"


def counting(name: str, *, reads: tuple[str, ...] = (STEP,)) -> Call:
    """A call that changes the single number of the steps."""
    held = [
        Slot(name=f"input.{at}", dtype="float32", shape=(), role=role, digest=f"in {role}")
        for at, role in enumerate(reads)
    ]
    return Call(
        name=name, phase=PHASE, slots=(*held, Slot(name="output.0", dtype="float32", shape=(), role=STEP, digest="out"))
    )


def test_steps_that_the_other_optimizer_counts_in_plain_python_belong_to_the_region() -> None:
    baseline = [counting("Tensor.add_.0.forward"), update("Tensor.mul_", "parameter a")]
    candidate = [update("Tensor.sub_", "parameter a")]
    region = pair_optimizers((baseline, candidate), [], ([0, 1], [0]), NAME)
    assert region is not None and region.members == ([0, 1], [0])


def test_a_number_that_is_more_than_a_counter_of_one_side_is_not_explained() -> None:
    """It is computed from the gradient too."""
    candidate = [update("Tensor.sub_", "parameter a")]
    for order in (slice(None), slice(None, None, -1)):
        writes = [counting("Tensor.add_.0.forward", reads=(STEP, "gradient a")), counting("Tensor.add_.1.forward")]
        baseline = [*writes[order], update("Tensor.mul_", "parameter a")]
        region = pair_optimizers((baseline, candidate), [], ([0, 1, 2], [0]), NAME)
        assert region is not None and region.members == ([2], [0])
