"""What a plan need not trace again.

trace_key.py          the request's part of a cache key
step_tapes.py         the traces of this process, by that key
disk_cache.py         traces, weights and answers of earlier processes, in files
operator_cache.py     results of operators that were traced before
"""
