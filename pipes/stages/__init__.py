"""Transforms: elements in, elements out, no outside I/O; one family a file."""

MODULES = (
    "batching",
    "bucketing",
    "collating",
    "columns",
    "filtering",
    "flattening",
    "gathering",
    "grouping",
    "joining",
    "keyed",
    "mapping",
    "moving",
    "restructuring",
    "selecting",
    "sharding",
    "shuffling",
    "splitting",
    "threads",
    "wrapping",
)
