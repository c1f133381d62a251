"""Files from outside come in by `reading`, ours are written by `writing`."""
