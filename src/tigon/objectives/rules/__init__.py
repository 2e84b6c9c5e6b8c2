"""What does not go with an objective, as data. Imports no torch."""
