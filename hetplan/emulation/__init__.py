"""A heterogeneous cluster of several regions, made of network namespaces on one Linux machine."""
