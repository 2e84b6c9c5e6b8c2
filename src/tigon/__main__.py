"""`python -m tigon` is `tigon`."""

from tigon.cli.app import main

main()
