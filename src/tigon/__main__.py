"""Runs the program `tigon` for `python -m tigon`."""

from tigon.cli.app import main

main()
