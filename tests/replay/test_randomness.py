"""Random ops are held to their law: what a right device draws passes whatever it draws, a wrong law is flagged."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tensorprobe.replay.randomness import draws_random, judge_dropped_gradient
from tests.checks.planting import DEVICE, Spoiler, assert_passes, check, planted, record, record_one

torch.manual_seed(0)
X = torch.randn(40, 50)

RANDOM: dict[str, Callable[[], Any]] = {
    "dropout": lambda: F.dropout(X, 0.3),
    "dropout in place": lambda: F.dropout(X.clone(), 0.3, inplace=True),
    "channels": lambda: F.dropout2d(torch.randn(4, 8, 5, 5), 0.5),
    "alpha dropout": lambda: F.alpha_dropout(X, 0.2, training=True),
    "rand": lambda: torch.rand(30, 40),
    "rand in bfloat16": lambda: torch.rand(30, 40, dtype=torch.bfloat16),
    "randn": lambda: torch.randn_like(X),
    "normal": lambda: torch.normal(X, 2.0),
    "normal_": lambda: X.clone().normal_(3.0, 0.5),
    "uniform_": lambda: X.clone().uniform_(-2, 5),
    "exponential_": lambda: X.clone().exponential_(2.0),
    "bernoulli": lambda: torch.bernoulli(torch.rand(30, 30)),
    "bernoulli_": lambda: X.clone().bernoulli_(0.2),
    "randint": lambda: torch.randint(0, 9, (500,)),
    "randperm": lambda: torch.randperm(50),
    "few": lambda: torch.rand(3),
    "multinomial": lambda: torch.multinomial(torch.rand(5, 9), 4),
    "attention": lambda: F.scaled_dot_product_attention(*[torch.randn(1, 2, 6, 4)] * 3, dropout_p=0.3),
    "attention, by position": lambda: F.scaled_dot_product_attention(*[torch.randn(1, 2, 6, 4)] * 3, None, 0.3),
    "attention module": lambda: torch.nn.MultiheadAttention(8, 2, dropout=0.4)(*[torch.randn(5, 3, 8)] * 3),
    "poisson": lambda: torch.poisson(torch.rand(20, 20) * 5),
}


@pytest.mark.parametrize("name", RANDOM)
@pytest.mark.parametrize("device", ["cpu", DEVICE])
def test_what_a_right_device_draws_passes(tmp_path: Path, name: str, device: str) -> None:
    *_, call = record(tmp_path / "run", RANDOM[name])
    assert draws_random(call.model)
    found = check(call, device=device)
    backward = "pass" if name == "attention module" else "skip"  # the only one with parameters
    assert (found.forward, found.backward) == ("pass", backward), found.message
    assert all(one.judged_by != "too few elements to tell" for one in found.details)


WRONG: dict[str, tuple[str, Spoiler]] = {
    "too few dropped": ("dropout", lambda t: torch.where((t == 0) & (torch.rand(t.shape) < 0.5), X / 0.7, t)),
    "wrong scale": ("dropout", lambda t: t * 1.01),
    "in place too": ("dropout in place", lambda t: t * 1.01),
    "not uniform": ("rand", lambda t: t * t),
    "not from zero": ("uniform_", lambda t: t.abs()),
    "too wide": ("randn", lambda t: t * 1.3),
    "shifted": ("normal", lambda t: t + 0.5),
    "constant": ("exponential_", lambda t: torch.full_like(t, 0.5)),
    "too many ones": ("bernoulli_", lambda t: (t + torch.rand(t.shape)).clamp(max=1).round()),
    "neither 0 nor 1": ("bernoulli_", lambda t: t * 0.5),
    "no permutation": ("randperm", lambda t: t.clamp(min=1)),
    "other integers": ("randint", lambda t: t // 2),
    "channels too large": ("channels", lambda t: t * 1.5),
    "few, wrong": ("few", lambda t: t * 0.5),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_law_is_flagged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    op, spoiler = WRONG[name]
    *_, call = record(tmp_path / "run", RANDOM[op])
    with planted(monkeypatch, outputs=spoiler):
        assert check(call, data="real").forward == "fail"


def test_the_gradient_of_dropout_is_dropped_where_its_result_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = record_one(tmp_path / "run", lambda: F.dropout(X.clone().requires_grad_(), 0.3), "dropout")
    assert_passes(call)
    for spoiler in (lambda g: g * 1.01, lambda g: g.roll(1, 0), torch.ones_like):
        with planted(monkeypatch, gradients=spoiler):
            found = check(call)
        assert (found.forward, found.backward) == ("pass", "fail")


@pytest.mark.needs_torch("2.4", "half precision on the CPU")
def test_subnormal_inputs_do_not_decide_on_the_gradient_of_dropout(tmp_path: Path) -> None:
    x = torch.cat((torch.full((500,), 3e-7), torch.ones(500))).half().requires_grad_()
    call = record_one(tmp_path / "run", lambda: F.dropout(x, 0.3), "dropout")
    assert_passes(call, data="real")


@pytest.mark.parametrize(
    "program",
    [
        lambda: F.dropout(X, 0.0),
        lambda: F.dropout(X, 0.5, False),
        lambda: F.dropout(X, 0.5, training=False),
        lambda: torch.dropout(X, 0.5, False),
        lambda: F.scaled_dot_product_attention(*[torch.randn(1, 2, 6, 4)] * 3, dropout_p=0.0),
        lambda: F.rrelu(X),
        lambda: torch.nn.MultiheadAttention(8, 2, dropout=0.4).eval()(*[torch.randn(5, 3, 8)] * 3),
    ],
)
def test_what_draws_nothing_is_compared_value_by_value(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: Callable[[], Any]
) -> None:
    *_, call = record(tmp_path / "run", program)
    assert not draws_random(call.model)
    found = check(call)
    assert (found.forward, found.message) == ("pass", "")
    with planted(monkeypatch, outputs=lambda t: t * 1.0001):
        assert check(call).forward == "fail"


def test_a_recurrent_network_draws_only_with_dropout_in_training(tmp_path: Path) -> None:
    quiet, noisy = torch.nn.LSTM(4, 4, 2), torch.nn.LSTM(4, 4, 2, dropout=0.5)
    x = torch.randn(5, 3, 4)
    for at, (network, random) in enumerate(((quiet, False), (noisy, True), (noisy.eval(), False))):
        noisy.train(random)
        call = record_one(tmp_path / str(at), lambda network=network: network(x), "lstm")  # type: ignore[misc]
        assert draws_random(call.model) is random
        assert check(call).forward == "pass"


def _needing(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, requires_grad=True)


@pytest.mark.parametrize(
    "program",
    [
        lambda: F.scaled_dot_product_attention(*[_needing(1, 2, 6, 4)] * 3, dropout_p=0.3).sum().backward(),
        lambda: F.scaled_dot_product_attention(*[_needing(1, 2, 6, 4)] * 3, None, 0.3).sum().backward(),
        lambda: torch.nn.MultiheadAttention(8, 2, dropout=0.4)(*[_needing(5, 3, 8)] * 3)[0].sum().backward(),
        lambda: torch.nn.LSTM(4, 4, 2, dropout=0.5)(_needing(5, 3, 4))[0].sum().backward(),
        lambda: F.dropout2d(_needing(4, 8, 5, 5), 0.5).sum().backward(),
    ],
)
def test_the_gradient_of_what_also_drops_is_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: Callable[[], Any]
) -> None:
    *_, call = [each for each in record(tmp_path / "run", program) if draws_random(each.model)]
    assert_passes(call)
    with planted(monkeypatch, gradients=lambda g: g * 1.001):
        found = check(call)
    assert (found.forward, found.backward) == ("pass", "fail")


@pytest.mark.parametrize("size", [1.0, 1e-6])
def test_the_gradient_of_dropout_may_be_as_coarse_as_its_dtype(size: float) -> None:
    torch.manual_seed(0)
    source = torch.randn(64).half()
    source[:4] *= 1e-5
    mask = (torch.rand(64) > 0.1).half()
    given = (size * torch.randn(64)).half()
    output, gradient = source * mask / 0.9, given * mask / 0.9
    opinion = judge_dropped_gradient(source, output, given, gradient)
    assert opinion.measured <= opinion.allowed
    assert not torch.equal(gradient, given * mask)
    wrong = judge_dropped_gradient(source, output, given, given)
    assert wrong.measured > wrong.allowed
