"""Where elements begin and end: files and stores, listers, openers and savers; the only outside I/O."""

MODULES = (
    "files",
    "fsspec_files",
    "listing",
    "local_stream",
    "s3",
    "s3_boto",
    "s3_checksum",
    "s3_client",
    "s3_fetch",
    "s3_loading",
    "s3_names",
    "s3_obstore",
    "s3_options",
    "s3_parts",
    "s3_ranges",
    "s3_retry",
    "s3_stream",
    "s3_upload",
    "saving",
    "seeking",
)
