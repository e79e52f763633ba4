"""The code of the ptdbg_ascend user guide, block by block, as its readers paste it. Comments are left out.

A line `...` stands, as in the guide, for the reader's own program; `paste` puts that program in. Nothing else is changed.
"""

from __future__ import annotations

MODES = {
    "list": (
        'set_dump_switch("ON", mode="list", '
        'scope=["Tensor_permute_1_forward", "Tensor_transpose_2_forward", "Torch_relu_3_backward"])'
    ),
    "range": 'set_dump_switch("ON", mode="range", scope=["Tensor_abs_1_forward", "Tensor_transpose_3_forward"])',
    "stack": 'set_dump_switch("ON", mode="stack", scope=["Tensor_abs_1_forward", "Tensor_transpose_3_forward"])',
    "acl": 'set_dump_switch("ON", mode="acl", scope=["Tensor_abs_1_forward"])',
    "api_list": 'set_dump_switch("ON", mode="api_list", api_list=["relu"])',
    "api_stack": 'set_dump_switch("ON", mode="api_stack")',
    "unfiltered": 'set_dump_switch("ON", filter_switch="OFF")',
}
"""The list of modes, an example each."""

WHOLE_NETWORK = """\
from ptdbg_ascend import *

seed_all()
seed_all(mode=True)

set_dump_path("./npu_dump.pkl", dump_tag="dump_conv2d")

...

register_hook(model, acc_cmp_dump)

...

set_dump_switch("ON")

...

set_dump_switch("OFF")

...
"""
"""Scenario 1, first step."""

COMPARE = """\
from ptdbg_ascend import *

...

dump_result_param={
"npu_pkl_path": "./npu_dump.pkl",
"bench_pkl_path": "./gpu_dump.pkl",
"npu_dump_data_dir": "./npu_dump_20230104_13434",
"bench_dump_data_dir": "./gpu_dump_20230104_132544",
"is_print_compare_log": True
}
compare(dump_result_param, "./output", True)
"""

COMPARE_STACKS = """\
from ptdbg_ascend import *

...

dump_result_param={
"npu_pkl_path": "./api_stack_npu_dump.pkl",
"bench_pkl_path": "./api_stack_gpu_dump.pkl",
"npu_dump_data_dir": "./api_stack_npu_dump_20230104_13434",
"bench_dump_data_dir": "./api_stack_gpu_dump_20230104_132544",
"is_print_compare_log": True
}
compare(dump_result_param, "./output", True, stack_mode=True)
"""

SCOPE_PATH = """\
set_dump_path("./npu_dump_scope.pkl")

...

register_hook(model, acc_cmp_dump)

...
"""
"""Scenario 1, second step, up to its examples."""

SCOPE_EXAMPLES = {
    "list": """\
set_dump_switch("ON", mode="list", scope=["Tensor_permute_1_forward", "Tensor_transpose_2_forward", "Torch_relu_3_forward"])
""",
    "range": """\
set_dump_switch("ON", mode="range", scope=["Tensor_abs_1_forward", "Tensor_transpose_2_forward"])
""",
    "acl_forward": """\
register_hook(model, acc_cmp_dump, dump_mode='acl', dump_config='dump.json')
set_dump_switch("ON", mode="acl", scope=["Tensor_permute_1_forward"])
""",
    "acl_backward": """\
register_hook(model, acc_cmp_dump, dump_mode='acl', dump_config='dump.json')
set_dump_switch("ON", mode="acl", scope=["Functional_conv2d_1_backward"])
set_backward_input(["xxx/Functional_conv2d_1_backward_input.0.npy"])
...
""",
}

DUMP_JSON = """\
{
 "dump":
 {
         "dump_list":[],
         "dump_path":"/home/HwHiAiUser/dump/output",
         "dump_mode":"all",
         "dump_op_switch":"on"
 }
}
"""

PARSE = """\
from ptdbg_ascend import *

parse("./npu_dump.pkl", "Torch_batch_normal_1_forward")
"""
"""Scenario 2."""

TAGS = {
    "all": "set_dump_path('./dump_resnet50/dump.pkl', dump_tag='all')",
    "conv2d_stack": "set_dump_path('./dump_resnet50/dump.pkl', dump_tag='conv2d_stack')",
}
"""Scenario 4: two dumps beside each other."""

MANY_RANKS_PATH = "set_dump_path('./dump_path/myDump.pkl', dump_tag='dump_conv2d')"
MANY_RANKS_HOOK = "register_hook(model, acc_cmp_dump, rank=rank_id)"
COMPARE_RANKS = "compare_distributed('dump_path/dump_conv2d_v1.0', 'dump_gpu/dump_conv2d_v1.0', './output')"


def paste(block: str, *programs: str) -> str:
    """The block with the reader's program, piece by piece, in the places of `...`; pieces that are empty leave nothing."""
    pieces = iter(programs)
    lines = [next(pieces) if line == "..." else line for line in block.splitlines()]
    rest = list(pieces)
    if rest:
        raise ValueError(f"the block has no place for {rest}")
    return "\n".join(lines) + "\n"
