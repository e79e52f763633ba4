"""Opinions: a policy turns measurements into verdicts, and verdicts into the first divergence.

Sees columns and names, never a tensor and never a disk: a new policy needs no new measurement.
"""

from tensorprobe.judge.policy import POLICIES, Policy, load_policy

__all__ = ["POLICIES", "Policy", "load_policy"]
