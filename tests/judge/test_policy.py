"""Policies: the built-in ones, a user's own, and what is wrong with a wrong one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import tensorprobe
from tensorprobe.errors import SettingsError
from tensorprobe.judge import POLICIES, Policy, load_policy
from tensorprobe.judge.policy import Rule
from tests.builders.runs import call, write

X = np.linspace(-1, 1, 64, dtype=np.float32)


def runs(folder: Path, *, scale: float = 1.05) -> tuple[Path, Path]:
    calls = [
        [
            call("Functional.linear.0.forward", inputs=[X], outputs=[X * np.float32(factor)]),
            call("Functional.gelu.0.forward", inputs=[X], outputs=[X * np.float32(factor)], module="mlp"),
        ]
        for factor in (1.0, scale)
    ]
    return write(folder / "a", calls[0]), write(folder / "b", calls[1])


def named(folder: Path, text: str, **options: float) -> list[str]:
    """The calls that diverge under a policy."""
    file = folder / "mine.toml"
    file.write_text(text)
    result = tensorprobe.compare(*runs(folder, **options), policy=str(file))
    assert result.summary.policy in ("mine", "named")
    return sorted({row.call for row in result.rows if row.verdict == "diverges" and row.side == "output"})


def test_the_built_in_policies_have_these_names() -> None:
    assert list(POLICIES) == ["noise-aware", "bitwise", "seed-2023", "seed-2024"]


def test_rules_of_a_user_come_first_and_the_base_judges_the_rest(tmp_path: Path) -> None:
    text = 'name = "named"\n[[rule]]\ncall = "Functional.linear.*"\nignore = true\n'
    assert named(tmp_path, text) == ["Functional.gelu.0.forward"]


@pytest.mark.parametrize(
    ("match", "left"),
    [
        ('op = "Functional.gelu"', "Functional.linear.0.forward"),
        ('module = "mlp"', "Functional.linear.0.forward"),
        ('call = "*linear*"', "Functional.gelu.0.forward"),
    ],
)
def test_rules_match_by_name_op_and_module(tmp_path: Path, match: str, left: str) -> None:
    assert named(tmp_path, f"[[rule]]\n{match}\nignore = true\n") == [left]


def test_rules_match_by_dtype_and_slot(tmp_path: Path) -> None:
    assert named(tmp_path, '[[rule]]\ndtype = "float32"\nslot = "output.*"\nignore = true\n') == []
    assert len(named(tmp_path, '[[rule]]\ndtype = "bfloat16"\nignore = true\n')) == 2


def test_a_limit_of_ones_own(tmp_path: Path) -> None:
    text = "[[rule]]\ndiverges = [{ max_abs = 0.04, relative_l2 = 0.01 }]\n"
    assert len(named(tmp_path, text)) == 2
    assert named(tmp_path, text, scale=1.03) == []


def test_more_noise_can_be_allowed(tmp_path: Path) -> None:
    assert named(tmp_path, "[[rule]]\nnoise = 1e7\n") == []


def test_a_figure_that_was_not_measured_is_not_judged(tmp_path: Path) -> None:
    calls = {name: [call("Functional.gelu.0.forward", outputs=[X * scale])] for name, scale in (("a", 1), ("b", 2))}
    a, b = (write(tmp_path / name, held, mode="summary") for name, held in calls.items())
    result = tensorprobe.compare(a, b, policy="seed-2023")
    assert [row.verdict for row in result.rows] == ["unmeasured"]
    assert result.summary.statuses["unmeasured"] == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("noise-awre", "unknown policy 'noise-awre'. Did you mean 'noise-aware'"),
        ("absent.toml", "no policy file"),
    ],
)
def test_a_policy_that_is_not_there(text: str, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        load_policy(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[rule", "this is not TOML"),
        ("[[rule]]\nnois = 1\n", r"mine\.toml, rule 1: unknown key 'nois'; did you mean 'noise'\?"),
        ("[[rule]]\nmax_abs = 1\n", r"rule 1: unknown key 'max_abs'; expected call, op, slot"),
        ("bass = 'bitwise'\n", r"mine\.toml: unknown key 'bass'; did you mean 'base'\?"),
        ("rule = 3\n", "mine.toml: expected array, got int"),
        ("[[rule]]\n\n[[rule]]\nnoise = 'much'\n", "mine.toml, rule 2, noise: expected float"),
        ("[[rule]]\nignore = true\nnoise = 2.0\n", "exactly one of noise, diverges, ignore; it has 2"),
        ("[[rule]]\ndiverges = [{ max_bas = 1.0 }]\n", "rule 1: unknown figure 'max_bas'. Did you mean 'max_abs'"),
        ("[[rule]]\ndiverges = [{}]\n", "without a figure"),
        ("[[rule]]\nnoise = -1.0\n", "greater than 0"),
        ("[[rule]]\nnoise = nan\n", "noise is nan; expected a number greater than 0"),
        ("[[rule]]\nnoise = inf\n", "noise is inf; expected a number greater than 0"),
        ("[[rule]]\ndiverges = [{ max_abs = nan }]\n", "the limit of max_abs is nan, which no figure exceeds"),
        ("[[rule]]\ndiverges = [{ max_abs = 1.0, slope = inf }]\n", "the limit of slope is inf"),
        ("[[rule]]\ndiverges = [{ max_abs = -0.5 }]\n", "never below 0, so all would diverge"),
        (f"[[rule]]\nnoise = 1{'0' * 5000}\n", "this is not TOML: .*digits"),
        (f"a = {'[' * 5000}", "this is not TOML: .*(recursion|nested)"),
        ('base = "seed-2022"\n', "unknown base 'seed-2022'. Did you mean 'seed-202"),
    ],
)
def test_what_is_wrong_with_a_policy_file_is_said(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(text)
    with pytest.raises(SettingsError, match=message):
        load_policy(str(file))


def test_a_policy_made_by_a_program_is_checked_like_one_in_a_file(tmp_path: Path) -> None:
    policy = Policy(name="mine", rules=[Rule(diverges=[{"max_abs": float("nan")}])])
    with pytest.raises(SettingsError, match="rule 1 of policy 'mine': the limit of max_abs is nan"):
        tensorprobe.compare(*runs(tmp_path), policy=policy)
