"""What `he-keras benchmark` measures, one file a benchmark."""
