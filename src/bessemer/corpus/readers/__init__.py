"""Files of any format to records: which files a source names, how they are cut into units, and one reader for each format."""
