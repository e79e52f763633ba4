"""The rules by themselves: facts in, standing out; and the order in which findings of many ranks are told."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tensorprobe.model.overflow import Arrival, FirstNonfinite
from tensorprobe.numerics.summary import Moments
from tensorprobe.ops import plain_name
from tensorprobe.watches.overflow.ledger import Finding, Ledger
from tensorprobe.watches.overflow.looker import facts_of, places_of
from tensorprobe.watches.overflow.result import merge_facts
from tensorprobe.watches.overflow.rules import Facts, Seen, given_numbers, is_allowed

INF = math.inf


def facts(slot: str, values: list[float], *, weight: bool = False) -> Facts:
    found = facts_of(slot, torch.tensor(values))
    assert found is not None
    return found._replace(never_mask=weight, key=repr(values))


def first(call: str, **changes: Any) -> FirstNonfinite:
    fields: dict[str, Any] = {key: [] for key in ("outputs", "inputs", "frames", "chain", "before", "spread")}
    fields |= {"number": 0, "index": 0, "repeat": 0, "epoch": 0, "step": 0, "rank": 0, "spread_count": 0}
    fields |= {"call": call, "op": call.rsplit(".", 2)[0], "module": "", "reason": "", "script": None, "note": ""}
    return FirstNonfinite(**{**fields, "direction": "forward", "kind": "inf", "verdict": "unknown", **changes})


def arrival(call: str, **changes: Any) -> Arrival:
    fields: dict[str, Any] = {"call": call, "slot": "input.0", "what": "input", "module": "", "step": 0, "rank": 0}
    fields |= {"index": 0, "epoch": 0, "dtype": "float32", "shape": [1], "nan": 1, "inf": 0, "frames": [], "spread": []}
    return Arrival(**{**fields, "spread_count": 0, **changes})


class Script:
    """Feeds a ledger; `found` are the calls that it says something of."""

    def __init__(self, **settings: Any) -> None:
        self.ledger = Ledger(**settings)

    def call(self, op: str, given: list[Facts], made: list[Facts], args: Any = None) -> list[str]:
        name = f"{op}.0.forward"
        seen = Seen(name, op, "", args, None, given, made)
        found = self.ledger.judge(
            seen,
            lambda kind: Finding(first(name, kind=kind)),
            lambda facts: Finding(arrival(name, slot=facts.slot, what="input")),
        )
        return [f"{type(each.fact).__name__} {each.fact.call}" for each in found]


def test_a_finding_is_reported_once_and_then_spreads() -> None:
    script = Script()
    assert script.call("Torch.exp", [facts("input.0", [1.0])], [facts("output.0", [INF, 1.0])]) == [
        "FirstNonfinite Torch.exp.0.forward"
    ]
    assert script.call("Torch.sin", [facts("input.0", [INF, 1.0])], [facts("output.0", [math.nan, 1.0])]) == []
    assert script.ledger.first_nonfinite[0].spread == ["Torch.sin.0.forward"]


def test_infinities_that_were_arguments_are_meant_with_their_sign() -> None:
    minus, given = {"type": "float", "value": "-Infinity"}, [facts("input.0", [1.0, 2.0])]
    assert Script().call("Tensor.masked_fill", given, [facts("output.0", [-INF, 2.0])], [minus]) == []
    assert Script().call("Tensor.masked_fill", given, [facts("output.0", [INF, 2.0])], [minus]) != []
    assert Script().call("Tensor.mul", given, [facts("output.0", [math.nan, -INF])], [minus]) != []


def test_infinities_are_passed_on_but_not_made_elsewhere() -> None:
    mask, rest = facts("input.1", [-INF, 0.0]), facts("input.0", [1.0, 3e38])
    assert Script().call("Tensor.add", [rest, mask], [facts("output.0", [-INF, 3e38])]) == []
    assert Script().call("Tensor.div", [rest, mask], [facts("output.0", [-INF, -INF])]) != []
    unseen = [each._replace(values=None) for each in (rest, mask, facts("output.0", [-INF, -INF]))]
    assert Script().call("Tensor.add", unseen[:2], unseen[2:]) == []  # without values, the sign has to do


def test_a_parameter_is_never_a_mask() -> None:
    made = [facts("output.0", [-INF, 1.0])]
    assert Script().call("Tensor.add_", [facts("input.0", [1.0, 1.0])], made) == []
    assert Script().call("Tensor.add_", [facts("input.0", [1.0, 1.0])], [made[0]._replace(never_mask=True)]) != []
    assert Script().call("Functional.linear", [facts("input.1", [-INF, 1.0], weight=True)], made) == [
        "Arrival Functional.linear.0.forward"
    ]
    assert Script().call("Functional.linear", [facts("input.1", [-INF, 1.0])], made) == []


def test_what_is_doubtful_is_a_finding_when_it_does_harm() -> None:
    for then, harm in (([math.nan], True), ([INF, 0.0], True), ([-INF], True), ([-INF, 0.0], False)):
        script = Script()
        log = [facts("output.0", [-INF, 7.0])]
        assert script.call("Tensor.log", [facts("input.0", [0.0, 1.0])], log) == []
        told = script.call("Tensor.mean", log, [facts("output.0", then)])
        assert told == (["FirstNonfinite Tensor.log.0.forward"] if harm else [])
        script.ledger.begin_step()
        assert script.ledger.intended == ({} if harm else {"Tensor.log": 1})


def test_a_result_without_dimensions_is_no_mask_unless_it_was_cast() -> None:
    zero, minus_inf = (
        facts(slot, [value])._replace(shape=[]) for slot, value in (("input.0", 0.0), ("output.0", -INF))
    )
    assert Script().call("Torch.log", [zero], [minus_inf]) == ["FirstNonfinite Torch.log.0.forward"]
    assert Script().call("Tensor.half", [zero], [minus_inf]) == []  # the fill of a mask, in a narrower type


def test_the_most_that_is_kept() -> None:
    script = Script(most=2)
    for count in range(4):
        made = [facts("output.0", [INF] * (count + 1))]
        script.call(f"Torch.exp{count}", [facts("input.0", [1.0])], made)
        script.ledger.begin_step()
    assert (len(script.ledger.first_nonfinite), script.ledger.left_out) == (2, 2)


def test_names_and_numbers() -> None:
    assert [plain_name(op) for op in ("Tensor.add_", "Torch._foreach_mul_", "Aten.log.default", "Tensor.__iadd__")] == [
        "add", "mul", "log", "add",
    ]  # fmt: skip
    assert plain_name("Tensor.__setitem__") == "__setitem__"
    tree = [1, True, {"slot": "input.0"}, {"type": "float", "value": "NaN"}, {"type": "tuple", "value": [2.5, 10**15]}]
    assert [str(number) for number in given_numbers(tree)] == ["1.0", "nan", "2.5", "1000000000000000.0"]
    assert is_allowed(["blocks.*.attn"], "Torch.exp", "Torch.exp.0.forward", "blocks.3.attn")
    assert not is_allowed(["exp"], "Torch.exp", "Torch.exp.0.forward", "")


def test_places_are_counted_and_the_first_are_named() -> None:
    tensor = torch.zeros(3, 4)
    tensor[1, 2] = math.nan
    tensor[2] = INF
    assert places_of(tensor) == (5, [[1, 2], [2, 0], [2, 1], [2, 2], [2, 3]])
    assert places_of(torch.tensor(INF)) == (1, [[]])
    assert places_of(torch.tensor([1.0, 65504.0]).half(), greatest=True) == (1, [[1]])


def test_facts_of_nothing_that_can_be_read() -> None:
    assert facts_of("x", torch.arange(3)) is None
    assert facts_of("x", torch.empty(2, device="meta")) is None
    assert facts_of("x", torch.eye(2).to_sparse()) is None
    empty = facts_of("x", torch.empty(0))
    assert empty is not None
    assert empty.clean
    assert isinstance(empty.moments, Moments)


def test_ranks_are_ordered_by_collectives() -> None:
    early = first("Torch.exp.0.forward", rank=1, epoch=0, index=90)
    received = first("Distributed.all_reduce.0.forward", rank=0, epoch=0, index=3, spread_count=5)
    later = first("Torch.log.0.forward", rank=0, epoch=1, index=1)
    first_nonfinite, _ = merge_facts([later, received, early])
    assert [(each.call, each.rank, each.number) for each in first_nonfinite] == [
        ("Torch.exp.0.forward", 1, 1),
        ("Torch.log.0.forward", 0, 2),
    ]
    assert first_nonfinite[0].spread == ["Distributed.all_reduce.0.forward (rank 0)"]
    assert first_nonfinite[0].spread_count == 6


@pytest.mark.parametrize("what", ["from another rank", "gradient of weight", "parameter weight"])
def test_what_another_rank_has_sent_did_not_come_in(what: str) -> None:
    received = arrival("Tensor.add.0.forward", rank=1, epoch=1, what=what)
    first_nonfinite, arrivals = merge_facts([first("Torch.exp.0.forward"), received])
    assert (len(first_nonfinite), arrivals) == (1, [])
    assert merge_facts([received])[1] == [received]
    data = arrival("Tensor.add.0.forward", rank=1, epoch=1)
    assert merge_facts([first("Torch.exp.0.forward"), data])[1] == [data]


def test_a_sum_that_overflows_on_all_ranks_is_one_finding_each() -> None:
    sums = [first("Distributed.all_reduce.0.forward", rank=rank) for rank in (0, 1)]
    assert [each.rank for each in merge_facts(sums)[0]] == [0, 1]
