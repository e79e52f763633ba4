"""Importing this begins to watch the DataLoaders of the program, so that its second iteration is recorded.

`msCheckerConfig.update_config` changes which iteration, where the files go, and what they hold. `dump.set_dump_switch`
is for programs whose data come from elsewhere.
"""

from api_accuracy_checker.config import msCheckerConfig
from api_accuracy_checker.dump import dump
from api_accuracy_checker.dump.dump import set_dump_switch
from tensorprobe.legacy.checker.dump import watch

__all__ = ["dump", "msCheckerConfig", "set_dump_switch"]

watch()
