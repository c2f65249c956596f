"""Command-line programs: thin shells around one library function each."""
