"""What is known of torch's ops, by name: their traits, and their canonical names. Never imports torch."""

from tensorprobe.ops.signatures import argument_name, parameter_names, positional_slot, signature_of
from tensorprobe.ops.table import (
    MOVING_NODES,
    Trait,
    axis_names,
    breaks_ties,
    has,
    has_parts,
    is_collective,
    module_path,
    plain_name,
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
    "has_parts",
    "is_collective",
    "module_path",
    "parameter_names",
    "plain_name",
    "positional_slot",
    "received_slots",
    "short_name",
    "signature_of",
    "traits_of",
    "why_not_replayed",
]
