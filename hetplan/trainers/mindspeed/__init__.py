"""MindSpeed."""
