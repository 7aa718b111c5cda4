"""`python -m scalelong`."""

from scalelong.cli import main

main()
