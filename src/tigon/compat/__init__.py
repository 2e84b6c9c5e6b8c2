"""Other libraries' names over tigon's parts."""
