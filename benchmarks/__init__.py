"""Measurements of tigon, and what makes the tables of docs/ from them. Not part of the wheel."""
