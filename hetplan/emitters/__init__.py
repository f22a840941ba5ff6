"""Plans as files of other tools: a folder for each trainer, and one for the schedulers."""
