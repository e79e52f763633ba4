"""Wording: facts come in as structs of the model, text goes out. Nothing here reads a run, measures or judges."""
