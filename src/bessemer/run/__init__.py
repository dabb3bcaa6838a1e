"""The run directory: its files, its lock, and the receipts of its stages."""
