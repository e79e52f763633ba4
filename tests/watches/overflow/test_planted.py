"""Planted overflows are named exactly, and nothing else is: the table of bench.overflow on the CPU and with two ranks.

The programs and their expected findings are in `bench/overflow/`.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from tests import warm
from tests.watches.overflow.planted import (
    ANYWHERE,
    RANKS,
    Outcome,
    Planted,
    Watching,
    assert_told,
    fp16_attention,
    run_ranks,
    watch_planted,
)

NEEDS = {
    ("2.3", "a gradient scaler for the CPU"): (
        "step_skipped_by_a_scaler scaled_loss_is_infinite scaler_that_skips_nothing forward_under_a_scaler"
    ),
    ("2.4", "half precision on the CPU"): (
        "fp16_attention fp16_autocast two_fp16_masks_on_one_row product_that_becomes_a_fp16_mask learning_rate_of_sgd "
        "cast_that_becomes_a_fp16_mask least_number_twice_in_fp16 greatest_number_on_purpose eps_of_adamw_lost_in_fp16 "
        "second_moment_of_adamw_in_fp16 second_moment_of_foreach_adamw_in_fp16"
    ),
    ("2.4", "fused AdamW on the CPU"): "second_moment_of_fused_adamw",
}


def needs(name: str) -> list[pytest.MarkDecorator]:
    return [pytest.mark.needs_torch(*need) for need, names in NEEDS.items() if name in names.split()]


@pytest.mark.parametrize("name", [pytest.param(name, marks=needs(name)) for name in ANYWHERE])
def test_a_planted_overflow_is_named_and_nothing_else(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    assert_told(watch_planted(ANYWHERE[name], tmp_path))


@pytest.fixture(scope="module")
def of_ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    """All programs of two ranks, run once."""
    return {outcome.name: outcome for outcome in run_ranks(tmp_path_factory.mktemp("ranks"), warm.Popen)}


@pytest.mark.xdist_group("overflows on two ranks")
@pytest.mark.parametrize("name", RANKS)
def test_an_overflow_on_one_of_two_ranks_is_named_once(name: str, of_ranks: dict[str, Outcome]) -> None:
    assert_told(of_ranks[name])


def test_the_table_is_large_enough_and_has_all_kinds() -> None:
    planted = [*ANYWHERE.values(), *RANKS.values()]
    first_nonfinite = [first for each in planted for first in each.first_nonfinite]
    assert len(first_nonfinite) >= 25
    assert {first.split()[1] for first in first_nonfinite} == {"nan", "inf"}
    assert any(each.arrivals for each in planted) and any(each.skipped for each in planted)
    assert any(not each.first_nonfinite and not each.arrivals and not each.skipped for each in planted)


@pytest.mark.needs_torch("2.4", "half precision on the CPU")
def test_what_was_not_expected_or_not_told_is_counted(tmp_path: Path) -> None:
    """The table itself can fail."""
    wrong = Planted("wrong", fp16_attention, first_nonfinite=("Torch.exp.0.forward inf",))
    outcome = watch_planted(wrong, tmp_path)
    assert not outcome.exact
    assert outcome.missed == ["Torch.exp.0.forward inf"]
    assert outcome.false == ["Tensor.matmul.0.forward inf"]


def test_a_program_that_raises_is_not_taken_for_silence(tmp_path: Path) -> None:
    def failing(watching: Watching) -> None:
        with watching():
            raise ZeroDivisionError(math.inf)

    with pytest.raises(ZeroDivisionError):
        watch_planted(Planted("failing", failing), tmp_path)
