"""Runs a comparison end to end: opens two runs, measures and judges every rank, and gathers the answer.

Ranks are independent of each other: each is a task that runs here, in processes of this machine, or elsewhere; the answer is
the same, byte for byte.
"""

from typing import TYPE_CHECKING

from tensorprobe.lazy import lazy

if TYPE_CHECKING:
    from tensorprobe.engine.call_diff import diff
    from tensorprobe.engine.comparison import assert_runs_agree, compare, suggest_map
    from tensorprobe.engine.result import Result, Rows
    from tensorprobe.engine.shards import ShardDone, compare_shard, merge_shards

__all__ = [
    "Result",
    "Rows",
    "ShardDone",
    "assert_runs_agree",
    "compare",
    "compare_shard",
    "diff",
    "merge_shards",
    "suggest_map",
]

__getattr__ = lazy(
    __name__,
    {
        "Result": "tensorprobe.engine.result",
        "Rows": "tensorprobe.engine.result",
        "ShardDone": "tensorprobe.engine.shards",
        "assert_runs_agree": "tensorprobe.engine.comparison",
        "compare": "tensorprobe.engine.comparison",
        "compare_shard": "tensorprobe.engine.shards",
        "diff": "tensorprobe.engine.call_diff",
        "merge_shards": "tensorprobe.engine.shards",
        "suggest_map": "tensorprobe.engine.comparison",
    },
)
