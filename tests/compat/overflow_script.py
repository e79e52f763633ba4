"""The overflow blocks of the ptdbg_ascend guide, and one script that runs all of them on a device, with its net."""

from __future__ import annotations

from tests.compat.guide_blocks import paste

BY_API = """\
from ptdbg_ascend import *

seed_all()
seed_all(mode=True)

...

register_hook(model, overflow_check, overflow_nums=2)

...
"""
"""Scenario 3, its first block. Comments are left out, here and below."""
BY_KERNEL = """\
from ptdbg_ascend import *

seed_all()
seed_all(mode=True)

...

register_hook(model, overflow_check, dump_mode='acl', dump_config='/home/xxx/dump.json')

...

set_overflow_check_switch("ON")

...

set_overflow_check_switch("OFF")

...

register_hook(model, acc_cmp_dump, dump_mode='acl', dump_config='dump.json')
set_dump_switch("ON", mode="acl", scope=["Functional_conv2d_1_backward"])
set_backward_input(["xxx/Functional_conv2d_1_backward_input.0.npy"])
"""
"""The second block; the last three lines are for a second run, with what the first has left."""

NET = """\
import hashlib, os, sys
from pathlib import Path
import torch
import torch.nn.functional as F
from torch import nn

device = sys.argv[1]

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 2, 1, bias=False), nn.Conv2d(2, 4, 1, bias=False)

    def forward(self, images):
        return self.conv2(torch.relu(self.conv1(images)))

def attend(x, hidden):
    parts = x.flatten(2)
    scores = (parts @ parts.transpose(1, 2)).masked_fill(hidden, float("-inf"))
    return F.softmax(scores, dim=-1) @ parts

class Training:
    def __init__(self):
        torch.manual_seed(3)
        self.model = Net().to(device)
        self.future = torch.ones(4, 4, dtype=torch.bool).triu(1).to(device)
        self.images = torch.rand(2, 1, 3, 3).to(device)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.01)

    def step(self, loss_of, images=None):
        self.optimizer.zero_grad()
        loss = loss_of(self.model(self.images if images is None else images))
        loss.backward()
        self.optimizer.step()

    def healthy(self):
        self.step(lambda x: attend(x, self.future).square().mean())

    def masked_everywhere(self):
        hidden = self.future.clone()
        hidden[0] = True
        with torch.no_grad():
            attend(self.model(self.images), hidden)

    def large(self):
        self.step(lambda x: torch.cumsum(x.abs() + 1, 0).mul(1e37).mul(100.0).mean())

    def large_gradient(self):
        with torch.no_grad():
            self.model.conv1.weight.fill_(1.0)
            self.model.conv2.weight.fill_(1e25)
        self.step(lambda x: x.sum() * 1e20, self.images * 1e-25)

    def digest(self):
        return hashlib.sha256(b"".join(p.detach().cpu().numpy().tobytes() for p in self.model.parameters())).hexdigest()

def say(kind, *what):
    print(kind, *what, sep="|", flush=True)

def left_installed():
    from tensorprobe.taps import active_probe
    return torch._C._len_torch_function_stack() + torch._C._len_torch_dispatch_stack() + (active_probe() is not None)

def expect_stop(*steps):
    try:
        for step in steps:
            step()
    except ValueError as error:
        say("stopped", type(error).__name__, error)
    torch.ones(1, device=device).div(0.0)  # nobody looks any more
    set_overflow_check_switch("OFF")
    say("left", left_installed())
"""
PLAIN = """
plain = Training()
for _ in range(3):
    plain.healthy()
say("plain", plain.digest())
"""
BUILD = "training = Training()\nmodel = training.model"
HEALTHY = """
for _ in range(3):
    training.healthy()
say("watched", training.digest())
"""
SECOND_RUN = """
import glob, shutil
(files,) = glob.glob("ptdbg_dump_v1.0/rank0/Overflow_info_*_1/Functional_conv2d_1_backward_input.0.npy")
shutil.copytree(os.path.dirname(files), "xxx")
"""
SCRIPT = "\n".join(
    [
        NET,
        PLAIN,
        'os.makedirs("first"); os.chdir("first")',
        paste(BY_API, BUILD, f"{HEALTHY}expect_stop(training.masked_everywhere, training.large)"),
        'os.chdir(".."); os.makedirs("kernels"); os.chdir("kernels")',
        paste(
            BY_KERNEL.partition("\nregister_hook(model, acc_cmp_dump")[0].replace("/home/xxx/", "../"),
            BUILD,
            "",
            "expect_stop(training.healthy, training.large)",
            "expect_stop(training.large)",
        ),
        'os.chdir(".."); os.makedirs("gradient"); os.chdir("gradient")',
        "training = Training()\nmodel = training.model",
        "register_hook(model, overflow_check, dump_mode='acl', dump_config='../dump.json')",
        "expect_stop(training.large_gradient)",
        SECOND_RUN,
        "training = Training()\nmodel = training.model",
        BY_KERNEL[BY_KERNEL.index("register_hook(model, acc_cmp_dump") :].replace("'dump.json'", "'../dump.json'"),
        'training.large_gradient()\nset_dump_switch("OFF")',
        "if device == 'npu':\n    from tensorprobe.sim.npu_module import dump_calls\n"
        "    [say('torch_npu', *call) for call in dump_calls]",
        'os.chdir(".."); os.makedirs("uncaught"); os.chdir("uncaught")',
        "training = Training()",
        "register_hook(training.model, overflow_check)",
        "training.masked_everywhere()",
    ]
)
FAULT = {"op": "aten::cumsum", "kind": "overflow"}
"""On the simulated NPU the largest element of every cumulative sum becomes infinite."""
