"""One configuration file per experiment, plain data."""
