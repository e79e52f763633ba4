"""`set_dump_switch`, for programs whose data do not come from a DataLoader."""

from tensorprobe.legacy.checker.dump import set_dump_switch

__all__ = ["set_dump_switch"]
