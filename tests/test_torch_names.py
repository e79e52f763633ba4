"""The names of torch that everything stands on: looked up once, replaced where an older torch lacks them."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch

from tensorprobe import torch_names
from tensorprobe.errors import UnsupportedTorch, UntriedTorch

ROOT = Path(__file__).resolve().parents[1]


def test_an_absent_name_that_nothing_replaces_is_one_clear_error() -> None:
    with pytest.raises(UnsupportedTorch, match=r"has no torch\._C\._no_such_name.*\n.*2\.1 to 2\.15"):
        torch_names.need("_C._no_such_name")


def test_an_absent_name_is_replaced_and_what_is_lost_is_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_names, "NAMES", [])
    assert torch_names.need("_C._no_such_name", since="9.9", lost="nothing can be seen", instead=7) == 7
    assert torch_names.need("Tensor.add", since="0.1", lost="never lost") is torch.Tensor.add
    assert torch_names.limits() == [
        f"nothing can be seen (torch 9.9 and newer have torch._C._no_such_name; this is {torch.__version__})"
    ]


def test_an_older_torch_is_refused_and_a_newer_one_warned_of() -> None:
    with pytest.raises(UnsupportedTorch, match=r"works with torch 2\.1 and newer"):
        torch_names.check_version((2, 0))
    with pytest.warns(UntriedTorch, match=r"newer than 2\.15"):
        torch_names.check_version((2, 16))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch_names.check_version((2, 1))
        torch_names.check_version((2, 15))


@pytest.mark.parametrize("name", torch_names.NAMES, ids=lambda name: name.path)
def test_a_name_is_there_since_the_version_that_is_declared(name: torch_names.Name) -> None:
    since = tuple(map(int, name.since.split(".")))
    assert name.found == (torch_names.torch_version() >= since)
    assert since == torch_names.OLDEST or name.before or name.lost


def test_addresses_are_those_of_the_values() -> None:
    tensor = torch.arange(6.0)[2:]
    assert torch_names.address_of(tensor) == tensor.data_ptr()


def test_autocast_is_read_and_set_for_each_kind_of_device() -> None:
    assert not torch_names.is_autocast_on("cpu")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch_names.is_autocast_on("cpu")
        torch_names.set_autocast("cpu", False)
        assert not torch_names.is_autocast_on("cpu")
        torch_names.set_autocast("cpu", True)


def test_the_page_on_versions_has_every_name_that_is_not_in_the_oldest() -> None:
    page = (ROOT / "docs/compatibility.md").read_text(encoding="utf-8")
    recent = [name for name in torch_names.NAMES if name.since != torch_names.version_text(torch_names.OLDEST)]
    assert len(recent) > 8
    for name in recent:
        assert f"| `{name.path}` | {name.since} | {name.before or name.lost} |" in page
