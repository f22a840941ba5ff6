"""What to measure next for a job: the measurements that shrink the interval of its best plans."""
