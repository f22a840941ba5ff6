"""Days of a whole run: step time, start-up, checkpoints, failures, restarts and backup paths."""
