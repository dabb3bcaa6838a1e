"""Readers of source files: list the files of a source, split them into parts, and read each format into documents."""
