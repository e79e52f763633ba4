"""Finds the call that makes the first NaN or inf, and says whether it is intentional. Importing this imports no torch."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, overload

from tensorprobe.lazy import lazy
from tensorprobe.settings import Names, Numbers, public

if TYPE_CHECKING:
    from tensorprobe.record import Run
    from tensorprobe.watches.overflow.keeping import KeptCall
    from tensorprobe.watches.overflow.recorded import find_overflow
    from tensorprobe.watches.overflow.result import OverflowResult
    from tensorprobe.watches.overflow.watch import OverflowWatch

__all__ = ["KeptCall", "OverflowResult", "OverflowWatch", "find_overflow", "overflow"]

__getattr__ = lazy(
    __name__,
    {
        "KeptCall": "tensorprobe.watches.overflow.keeping",
        "OverflowResult": "tensorprobe.watches.overflow.result",
        "OverflowWatch": "tensorprobe.watches.overflow.watch",
        "find_overflow": "tensorprobe.watches.overflow.recorded",
    },
)


@overload
def overflow(
    target: str | os.PathLike[str] | Run,
    *,
    steps: Numbers | None = None,
    ranks: Numbers | None = None,
    allow: Names = (),
    near: float | None = None,
    replay: bool = True,
    max_replay_bytes: int | str | None = None,
) -> OverflowResult: ...
@overload
def overflow(
    target: Any = None,
    *,
    out: str | os.PathLike[str] | None = None,
    steps: Numbers | None = None,
    ranks: Numbers | None = None,
    allow: Names = (),
    near: float | None = None,
    replay: bool = True,
    max_replay_bytes: int | str | None = None,
    stop_after: int | None = None,
    ring: int = 64,
    under_scaler: bool = False,
    saturation: bool = True,
    status: bool = True,
    keep: Names = (),
    keep_bytes: int | str = "64M",
    overwrite: bool = False,
) -> OverflowWatch: ...
@public
def overflow(
    target: Any = None,
    *,
    out: str | os.PathLike[str] | None = None,
    steps: Numbers | None = None,
    ranks: Numbers | None = None,
    allow: Names = (),
    near: float | None = None,
    replay: bool = True,
    max_replay_bytes: int | str | None = None,
    stop_after: int | None = None,
    ring: int = 64,
    under_scaler: bool = False,
    saturation: bool = True,
    status: bool = True,
    keep: Names = (),
    keep_bytes: int | str = "64M",
    overwrite: bool = False,
) -> OverflowResult | OverflowWatch:
    """Find the call that makes the first NaN or inf: in a recorded run, or in a program while it runs.

        print(tensorprobe.overflow("runs/a"))                        # a recorded run: an OverflowResult

        with tensorprobe.overflow(model, out="runs/ovf") as watch:   # a program: a watch
            train()
        print(watch.result)

    Args:
        target: a run (its path, or a Run), the folder of an earlier watch, or the model to watch. The model gives
            modules their names in the report and may be left out.
        steps, ranks: look only at these, e.g. `[0, 2]` or `'0,2-4'`.
        allow: never report these ops, calls or modules. Globs work.
        near: also report outputs near the limit of their dtype: `near=2` reports outputs beyond half of the limit.
        replay: run the first bad calls again in higher precision, to tell device faults from numbers that are too large.
        max_replay_bytes: do not replay recorded calls that would need more memory, e.g. `4G`. Default: a quarter of this
            machine's.

    The other settings are for a watch only:
        out: folder for the findings, as they happen.
        stop_after: raise TrainingStopped after this many findings.
        ring: how many of the last calls are kept for a process that is killed.
        under_scaler: also report overflows in steps that a GradScaler skips.
        saturation: report outputs that are stuck at the greatest number of their dtype.
        status: read the overflow register of the device, if it has one.
        keep, keep_bytes: keep copies of the inputs of these ops, up to so many bytes, so that in-place calls can be
            replayed.
        overwrite: replace the findings of an earlier watch in `out`.

    Raises SettingsError for a setting that is wrong, before anything starts.
    """
    given = dict(locals())
    from tensorprobe.errors import SettingsError
    from tensorprobe.record import Run
    from tensorprobe.watches.overflow.settings import SEARCH, OverflowSettings

    given.pop("target")
    if not isinstance(target, (str, os.PathLike, Run)):
        from tensorprobe.watches.overflow.watch import OverflowWatch

        return OverflowWatch(target, **given)
    from tensorprobe.watches.overflow.recorded import find_overflow

    for name, declared in OverflowSettings.declared().items():
        if name not in SEARCH and given[name] != declared.default:
            raise SettingsError(
                f"{name} applies only to a running program; for a recorded run use {', '.join(SEARCH)}."
            )
    return find_overflow(target, **{name: given[name] for name in SEARCH})
