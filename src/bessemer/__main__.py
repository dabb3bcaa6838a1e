"""`python -m bessemer`."""

from bessemer.cli import main

main()
