"""A cache in shared memory: one mapped file per node, read by all without locks, written by one at a time."""
