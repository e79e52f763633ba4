"""What is known of torch's ops, by name: their traits, and their canonical names. Never imports torch."""

from tensorprobe.ops.table import (
    MOVING_NODES,
    Trait,
    argument_name,
    axis_names,
    breaks_ties,
    has,
    is_collective,
    parameter_names,
    plain_name,
    positional_slot,
    received_slots,
    short_name,
    traits_of,
    why_not_replayed,
)

__all__ = [
    "MOVING_NODES",
    "Trait",
    "argument_name",
    "axis_names",
    "breaks_ties",
    "has",
    "is_collective",
    "parameter_names",
    "plain_name",
    "positional_slot",
    "received_slots",
    "short_name",
    "traits_of",
    "why_not_replayed",
]
