"""A suggested map is read by `compare` as it is, and pairs the modules of two programs of one model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typer.testing import CliRunner

import tensorprobe
from tensorprobe.cli.main import app
from tensorprobe.engine import suggest_map


class Attention(nn.Module):
    def __init__(self, names: dict[str, str]) -> None:
        super().__init__()
        self.order = [names[part] for part in ("q", "k", "v", "o")]
        for name in self.order:
            self.add_module(name, nn.Linear(8, 8, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self.get_submodule(name)(x) for name in self.order[:3])
        mixed: Tensor = self.get_submodule(self.order[3])(F.softmax(q @ k.transpose(1, 2), -1) @ v)
        return mixed


class Fused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24, bias=False), nn.Linear(8, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        mixed: Tensor = self.out(F.softmax(q @ k.transpose(1, 2), -1) @ v)
        return mixed


class Block(nn.Module):
    def __init__(self, names: dict[str, str]) -> None:
        super().__init__()
        self.names = names
        self.add_module(names["norm"], nn.LayerNorm(8))
        self.add_module(names["attn"], Fused() if names.get("fused") else Attention(names))

    def forward(self, x: Tensor) -> Tensor:
        sum_: Tensor = x + self.get_submodule(self.names["attn"])(self.get_submodule(self.names["norm"])(x))
        return sum_


class Inner(nn.Module):
    def __init__(self, names: dict[str, str]) -> None:
        super().__init__()
        self.names = names
        self.add_module(names["embed"], nn.Embedding(16, 8))
        self.add_module(names["layers"], nn.ModuleList(Block(names) for _ in range(2)))

    def forward(self, ids: Tensor) -> Tensor:
        x: Tensor = self.get_submodule(self.names["embed"])(ids)
        for block in self.get_submodule(self.names["layers"]):
            x = block(x)
        return x


class Model(nn.Module):
    def __init__(self, names: dict[str, str]) -> None:
        super().__init__()
        self.body, self.names = names["body"], names
        inner = Inner(names)
        self.add_module(self.body, inner) if self.body else self.__dict__.update(inner=inner)
        if not self.body:
            for name, module in inner.named_children():
                self.add_module(name, module)
        self.add_module(names["head"], nn.Linear(8, 16, bias=False))

    def forward(self, ids: Tensor) -> Tensor:
        inner = self.get_submodule(self.body) if self.body else self.__dict__["inner"].forward
        logits: Tensor = self.get_submodule(self.names["head"])(inner(ids))
        return logits


class Wrapper(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.module(ids)
        return logits


HUB = {"body": "model", "embed": "embed_tokens", "layers": "layers", "norm": "input_layernorm", "attn": "self_attn",
       "q": "q_proj", "k": "k_proj", "v": "v_proj", "o": "o_proj", "head": "lm_head"}  # fmt: skip
OWN = {"body": "", "embed": "tok", "layers": "blocks", "norm": "ln", "attn": "mix",
       "q": "wq", "k": "wk", "v": "wv", "o": "out", "head": "output"}  # fmt: skip


def record(folder: Path, names: dict[str, str], level: str, *, wrap: bool = False) -> Path:
    torch.manual_seed(0)
    weights = Model(HUB).state_dict().values()
    model: nn.Module = Model(names)
    ids = torch.arange(10).reshape(2, 5)
    held = iter(weights)
    for name, ours in model.named_parameters():
        ours.data.copy_(torch.cat([next(held) for _ in range(3)]) if "qkv" in name else next(held))
    model = Wrapper(model) if wrap else model
    settings = {"in_process": True, "stacks": False}
    with tensorprobe.capture(folder, model=model, level=level, **settings):  # type: ignore[arg-type]
        model(ids).sum().backward()
    return folder


@pytest.mark.parametrize("level", ["api", "module"])
@pytest.mark.parametrize("swap", [False, True])
def test_a_suggested_map_pairs_every_module_of_a_rewrite(level: str, swap: bool, tmp_path: Path) -> None:
    runs = [record(tmp_path / "a", HUB, level), record(tmp_path / "b", OWN, level)]
    runs = runs[::-1] if swap else runs
    said = CliRunner().invoke(app, ["compare", *map(str, runs), "--suggest-map"])
    assert said.exit_code == 0
    (tmp_path / "names.map").write_text(said.stdout)
    if not swap:
        assert "Module.model.layers.*.self_attn.q_proj = Module.blocks.*.mix.wq\n" in said.stdout
    result = tensorprobe.compare(*runs, map=tmp_path / "names.map", prove="off")
    assert result.exit_code == 0, str(result)
    assert not [note for note in result.summary.notes if "pairs no calls" in note]
    assert result.summary.buckets.only_baseline == result.summary.buckets.only_candidate == 0


@pytest.mark.parametrize("swap", [False, True])
def test_a_wrapper_on_one_side_is_one_line(swap: bool, tmp_path: Path) -> None:
    runs = [record(tmp_path / "a", HUB, "api"), record(tmp_path / "b", HUB, "api", wrap=True)]
    text = suggest_map(*(runs[::-1] if swap else runs))
    assert [line for line in text.splitlines() if line[0] != "#"] == [
        "Module.module = Module" if swap else "Module = Module.module"
    ]


def test_alike_names_need_no_map_and_a_fused_projection_gets_none(tmp_path: Path) -> None:
    one = record(tmp_path / "a", HUB, "api")
    assert suggest_map(one, one).endswith("belong together as they are named.\n")
    text = suggest_map(one, record(tmp_path / "b", OWN | {"fused": "yes"}, "api"))
    assert "# only in the candidate: blocks.0.mix.qkv\n" in text
    assert "Module.model.layers.*.self_attn.o_proj = Module.blocks.*.mix.out\n" in text
