"""Launch commands of other trainers: read, understood, and turned into plans."""
