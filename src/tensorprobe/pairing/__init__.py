"""Compare two runs: pair their calls and measure how much their tensors differ. No thresholds, no verdicts."""
