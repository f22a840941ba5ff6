"""Which texts are names in files and values, as regular expressions that JSON Schema takes too."""

NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"
"""A word that can stand in a path such as `island/3`."""
NODE_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]*/[0-9]+$"
"""A node as island/number."""
