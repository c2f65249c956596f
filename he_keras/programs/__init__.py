"""The programs that `he-keras` runs, one file a verb: flags, and one call of the library."""
