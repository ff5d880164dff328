"""What a worker knows of the other nodes: thin drivers of `umbel.cluster.node`."""
