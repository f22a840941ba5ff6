"""Which plans a target can run, in families whose plans differ only in meshes, order and layers."""
