"""The run of an evaluation and its records: what is attacked, what was found, where it lies."""
