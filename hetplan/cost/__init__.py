"""What a plan costs: schedule replay, memory, intervals."""
