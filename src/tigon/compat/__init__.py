"""The APIs of other libraries, implemented with tigon's ops."""
