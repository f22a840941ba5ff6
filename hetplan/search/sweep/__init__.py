"""Many questions at once: a grid of models, clusters, links and jobs, planned side by side."""
