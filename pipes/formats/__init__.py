"""Bytes to records and back: readers that state their position, and the stages built on them."""

MODULES = (
    "archives",
    "chunks",
    "decode",
    "delimited",
    "jsonl",
    "lines",
    "records",
    "tables",
    "tar",
    "tar_headers",
    "webdataset",
    "zip",
    "zip_members",
)
