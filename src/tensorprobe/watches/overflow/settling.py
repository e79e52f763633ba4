"""A birth that is sure: replayed on the CPU, its script written, its verdict put into the finding."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import msgspec

from tensorprobe.model.overflow import Birth
from tensorprobe.replay.functions import CannotReplay
from tensorprobe.replay.runs import said
from tensorprobe.watches.overflow.born import BornCall
from tensorprobe.watches.overflow.ledger import Finding
from tensorprobe.watches.overflow.replaying import Judgement, replay_verdict
from tensorprobe.watches.overflow.saving import save_birth


def judge_birth(finding: Finding, folder: Path | None, *, replay: bool, notes: Counter[str]) -> None:
    """Give a birth its verdict and, where it can be run alone, its script."""
    born: BornCall | None = finding.born
    fact = finding.fact
    if not isinstance(fact, Birth):
        return
    if fact.verdict == "unknown":
        judged = _judge(born) if replay else Judgement("unknown", "replay is off")
        fact = msgspec.structs.replace(fact, verdict=judged.verdict, reason=judged.reason)
    if born is not None:
        born.birth = fact
        if not born.lacking and folder is not None and replay:
            try:
                script = save_birth(born, folder)
                fact = msgspec.structs.replace(fact, script=str(script))
            except (CannotReplay, OSError) as error:
                notes[f"{fact.call}: no replay script: {said(error)}"] += 1
        born.birth = fact
    finding.fact = fact


def _judge(born: BornCall | None) -> Judgement:
    if born is None:
        return Judgement("unknown", "a collective cannot be run alone")
    if born.lacking:
        hint = f"; keep=[{born.replayed.name!r}] keeps a copy the next time" if "keep_bytes" not in born.lacking else ""
        return Judgement("unknown", f"{born.lacking}, so it cannot be replayed{hint}")
    return replay_verdict(born.replayed, born.inputs(), born.found(), gradients=born.gradients())
