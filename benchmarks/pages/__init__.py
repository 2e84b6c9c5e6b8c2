"""The measured parts of docs/, made from the records in benchmarks/results: `make pages`."""
