"""`python -m tigon` is `tigon`."""

from tigon.cli import main

main()
