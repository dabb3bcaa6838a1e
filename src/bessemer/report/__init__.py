"""The report: what a run did, on one page that needs nothing but a browser."""
