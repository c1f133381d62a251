"""The workers' side: executor, worker, one runtime per layout, process groups, weights."""
