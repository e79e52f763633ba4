"""Which calls of an old dump belong to its optimizer, where only their order tells."""

from __future__ import annotations

from tensorprobe.legacy.layouts.optimizer_calls import find_optimizer_calls
from tensorprobe.record.run import Entry


def found(*names: str) -> set[str]:
    return set(find_optimizer_calls([Entry(line, name, 0) for line, name in enumerate(names)]))


def test_updates_after_a_backward_are_calls_of_the_optimizer() -> None:
    step = ["Tensor.mul_.0.forward", "Tensor.add_.0.forward", "Tensor.sqrt.0.forward", "Tensor.addcdiv_.0.forward"]
    passes = ["Functional.linear.0.forward", "Functional.linear.0.backward"]
    assert found(*passes, *step, "Functional.linear.1.forward", "Functional.linear.1.backward") == set(step)


def test_an_evaluation_after_the_backward_is_none() -> None:
    passes = ["Functional.linear.0.forward", "Functional.linear.0.backward"]
    assert (
        found(*passes, "Functional.linear.1.forward", "Tensor.relu_.0.forward", "Functional.linear.2.forward") == set()
    )
