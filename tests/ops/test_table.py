"""The table of ops: how names are looked up, and what the answers rest on."""

from __future__ import annotations

import pytest
import torch

from tensorprobe import ops
from tensorprobe.ops import Trait
from tensorprobe.ops.table import _NAMES, _OF_ONE_SPELLING


@pytest.mark.parametrize(
    "op",
    ["Tensor.add", "Tensor.add_", "Torch._foreach_add_", "Aten.add.Tensor", "Aten.add_.Scalar", "Tensor.__iadd__"],
)
def test_all_forms_of_an_op_have_its_traits(op: str) -> None:
    assert ops.plain_name(op) == "add"
    assert ops.traits_of(op) == ops.traits_of("Torch.add")
    assert ops.has(op, Trait.ROUNDED_ONCE | Trait.MOVES)
    assert not ops.has(op, Trait.MOVES)


def test_an_unknown_op_has_no_traits() -> None:
    assert ops.traits_of("Torch.nobody_knows_it") is Trait.NONE
    assert ops.traits_of("Ops.mylib.add_it.default") is Trait.NONE


def test_a_reflected_operator_is_not_taken_for_another_op() -> None:
    assert not ops.has("Tensor.__rand__", Trait.RANDOM)
    assert ops.has("Torch.rand", Trait.RANDOM)


def test_writing_in_place_is_a_trait_of_one_spelling() -> None:
    assert ops.has("Tensor.index_put_", Trait.WRITES_PART)
    assert ops.has("Aten.index_put_.default", Trait.WRITES_PART)
    assert not ops.has("Torch.index_put", Trait.WRITES_PART)
    assert ops.has("Torch.index_put", Trait.REDUCES)


def test_a_module_may_hold_any_op() -> None:
    assert ops.has("Module.layers.0.Linear", Trait.MULTIPLIES)
    assert not ops.has("Module.layers.0.view", Trait.MOVES | Trait.VIEW)
    assert ops.has("Module.layers.0.Block", Trait.DECIDES)


def test_a_class_of_torch_computes_its_op() -> None:
    assert not ops.has("Module.layers.0.Linear", Trait.DECIDES | Trait.DIVIDES | Trait.EXPONENTIAL)
    assert ops.has("Module.layers.0.ReLU", Trait.DECIDES)


@pytest.mark.parametrize(
    ("op", "traits", "slots"),
    [
        ("all_gather_into_tensor", Trait.MOVES, "input.0"),
        ("_all_gather_base", Trait.MOVES, None),
        ("all_to_all_single", Trait.MOVES, "input.0"),
        ("gather", Trait.MOVES, "input.1"),
        ("isend", Trait.MOVES, None),
        ("reduce_scatter_tensor", Trait.REDUCES, "input.0"),
        ("all_reduce", Trait.REDUCES, None),
        ("barrier", Trait.NONE, None),
    ],
)
def test_collectives_move_or_add_up(op: str, traits: Trait, slots: str | None) -> None:
    assert ops.traits_of(f"Distributed.{op}") == traits
    received = [slot for slot in ops.received_slots(f"Distributed.{op}") if ".kwargs." not in slot]
    assert received == ([] if slots is None else [slots])


@pytest.mark.parametrize("op", ["Tensor.resize_", "Torch.empty_like", "Distributed.all_reduce", "Module.a.Linear"])
def test_what_is_not_replayed_has_a_reason(op: str) -> None:
    assert ops.why_not_replayed(op)
    assert ops.why_not_replayed("Torch.add") is None


def test_a_part_of_a_name_is_enough_to_refuse_it() -> None:
    assert ops.why_not_replayed("Aten.mm.load") == "load reads or writes files"


def test_equal_values_leave_the_choice_open() -> None:
    assert ops.breaks_ties("Aten.topk.default")
    assert ops.breaks_ties("Functional.max_pool2d")
    assert not ops.has("Functional.max_pool2d", Trait.CHOOSES)
    assert not ops.breaks_ties("Torch.mm")


def test_tensors_passed_by_position_have_names() -> None:
    assert ops.argument_name("Functional.linear", "input.1") == "weight"
    assert ops.argument_name("Functional.linear", "parameters.bias") == "bias"
    assert ops.argument_name("Torch.mm", "input.1") == ""
    assert ops.positional_slot("Functional.linear", "input.kwargs.weight") == "input.1"
    assert ops.positional_slot("Functional.linear", "input.kwargs.other") == "input.kwargs.other"


def test_names_in_the_table_can_be_found_again() -> None:
    for trait, names in _NAMES.items():
        for name in names.split():
            assert ops.has(f"Tensor.{name}", trait), name


def test_a_view_in_the_table_is_one_for_torch() -> None:
    x = torch.arange(24.0).reshape(2, 3, 4)
    given = {
        **dict.fromkeys(("transpose", "swapaxes", "swapdims", "movedim"), (0, 1)),
        **dict.fromkeys(("chunk", "split", "tensor_split"), (2,)),
        "view": (6, 4), "view_as": (x,), "permute": (2, 0, 1), "unsqueeze": (0,), "narrow": (0, 0, 1), "select": (0, 0),
        "unflatten": (0, (2, 1)),
    }  # fmt: skip
    for name in _NAMES[Trait.VIEW].split():
        source = x[0] if name == "t" else x
        function = getattr(torch.ops.aten if name in {"alias", "slice"} else torch.Tensor, name)
        result = function(source, *given.get(name, ()))
        for view in result if isinstance(result, (list, tuple)) else (result,):
            assert view.untyped_storage().data_ptr() == x.untyped_storage().data_ptr(), name


def test_traits_of_one_spelling_are_not_inherited() -> None:
    assert ops.has("Tensor.detach", Trait.VIEW)
    assert not ops.traits_of("Tensor.detach_") & _OF_ONE_SPELLING


@pytest.mark.parametrize("name", ["Embedding", "Flatten", "Identity", "Anything"])
def test_no_name_of_a_class_promises_that_nothing_is_computed(name: str) -> None:
    assert not ops.has(f"Module.layers.0.{name}", Trait.MOVES)
    assert ops.has(f"Module.layers.0.{name}", Trait.REDUCES)
