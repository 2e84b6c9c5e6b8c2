"""The optimizers: a table of rows (table.py), their techniques (optimizers.py), and tigon's own GaLore (galore.py)."""
