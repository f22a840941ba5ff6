"""Reading and writing what persists: YAML and JSON with line numbers, atomic writes, schemas."""
