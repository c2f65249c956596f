"""One file for each layout of public checkpoints."""
