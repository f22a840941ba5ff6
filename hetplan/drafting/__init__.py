"""Cluster, model and job from a few words: what `hetplan init` writes, and one line plans."""
