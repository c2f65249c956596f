"""What `tools/benchmark.py` measures, one file a benchmark."""
