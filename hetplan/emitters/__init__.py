"""Plans as files of other tools: one module per tool."""
