"""Puts two runs side by side: which call belongs to which, and how much their tensors differ. Has no opinion."""
