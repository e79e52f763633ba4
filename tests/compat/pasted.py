"""The training scripts of the guide, each of which runs once in each place: device and net."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.compat import guide_blocks as guide
from tests.compat.guide_blocks import paste
from tests.compat.scripts import run_on, write_program

BEGIN = """\
import sys
from pathlib import Path
from small_nets import Trainer

device, net = sys.argv[1:]
"""
BUILD = """\
trainer = Trainer(net, device)
model = trainer.model
"""
WHOLE = BEGIN + paste(
    guide.WHOLE_NETWORK, BUILD, "trainer.step()", "trainer.step()", "trainer.step()\ntrainer.report()"
)
PLAIN_STEPS = 14
PLAIN = f"""
plain = Trainer(net, device)
for step in range({PLAIN_STEPS}):
    plain.step(Path("expected") if step == 1 else None)
    plain.report()
from ptdbg_ascend import *
"""
"""What training gives before anything of the tool is loaded."""
HOOK = "register_hook(model, acc_cmp_dump)"
ACL_HOOK = "register_hook(model, acc_cmp_dump, dump_mode='acl', dump_config='dump.json')"
TRAIN = """
trainer.step()
set_dump_switch("OFF")
"""
END = """
trainer.report()
if device == "npu":
    from tensorprobe.sim.npu_module import dump_calls
    print(*[" ".join(call) for call in dump_calls], sep="\\n")
"""


def _examples() -> str:
    """One program with every example. A folder is copied away where the guide's next example would replace it."""
    parts = [BEGIN, PLAIN, BUILD]
    for mode, switch in {"first": 'set_dump_switch("ON")', **guide.MODES}.items():
        path, hook = "list" if mode == "first" else mode, ACL_HOOK if mode == "acl" else HOOK
        parts.append(f'set_dump_path("./{path}/npu_dump.pkl")\n{hook}\n{switch}{TRAIN}')
        if mode == "first":
            parts.append('import shutil\nshutil.copytree("list/ptdbg_dump_v1.0/rank0/npu_dump", "xxx")\n')
    for tag, path in guide.TAGS.items():
        mode = '"ON", mode="stack"' if tag == "conv2d_stack" else '"ON"'
        parts.append(f"{path}\n{HOOK}\nset_dump_switch({mode}){TRAIN}")
    parts.append(paste(guide.SCOPE_PATH, "", ""))
    for name, example in guide.SCOPE_EXAMPLES.items():
        parts.append(paste(example, *[""] * example.count("...")) + TRAIN)
        if name in ("list", "range"):
            parts.append(f'shutil.copytree("ptdbg_dump_v1.0/rank0", "scope_{name}")\n')
    return "".join([*parts, END])


@dataclass(frozen=True)
class Place:
    """Where a script runs, with which net."""

    device: str
    net: str

    def __str__(self) -> str:
        return f"{self.device}-{self.net}"


PLACES = [Place(device, net) for device in ("cpu", "npu") for net in ("conv", "gpt")]
FAULT = {"op": "aten::convolution_overrideable", "kind": "swap-rows", "dim": 1, "module": "conv2", "nth": 1}
"""Two channels of the second convolution change places, in the step that is dumped."""
SCRIPTS = {"whole": WHOLE, "faulty": WHOLE, "examples": _examples()}


class Ran(NamedTuple):
    """The folder in which a script has run, and what it said."""

    folder: Path
    code: int
    stdout: str
    stderr: str


Pasted = Callable[[str, Place], Ran]


@pytest.fixture(scope="module")
def pasted(tmp_path_factory: pytest.TempPathFactory) -> Pasted:
    """Runs a script of this module in a place, once."""

    @functools.cache
    def run(name: str, place: Place) -> Ran:
        folder = tmp_path_factory.mktemp(f"{name}-{place}")
        (folder / "dump.json").write_text(guide.DUMP_JSON.replace("/home/HwHiAiUser/dump", "."))
        fault = json.dumps(FAULT) if name == "faulty" else None
        script = write_program(folder, SCRIPTS[name])
        done = run_on(place.device, script, place.net, fault=fault, code=None, cold=fault is not None)
        return Ran(folder, done.returncode, done.stdout, done.stderr)

    def checked(name: str, place: Place) -> Ran:
        ran = run(name, place)
        assert ran.code == 0, ran.stderr
        return ran

    return checked


everywhere = pytest.mark.parametrize("place", PLACES, ids=str)
"""The test in each place."""
