"""FlagScale."""
