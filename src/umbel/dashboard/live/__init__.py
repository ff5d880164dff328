"""The cluster as it is now: see `source`."""
