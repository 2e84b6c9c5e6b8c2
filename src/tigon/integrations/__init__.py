"""tigon's ops inside other projects' trainers. Each module is imported by name and needs its project installed."""
