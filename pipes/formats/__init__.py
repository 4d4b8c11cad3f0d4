"""Bytes to records and back: readers that state their position, and the stages built on them."""

MODULES = (
    "archives",
    "chunks",
    "decode",
    "delimited",
    "encode",
    "extracting",
    "jsonl",
    "lines",
    "npy",
    "npy_files",
    "parquet",
    "parquet_files",
    "records",
    "tables",
    "tar",
    "tar_headers",
    "webdataset",
    "webdataset_writer",
    "zip",
    "zip_members",
)
