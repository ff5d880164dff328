"""Connections: addresses, opening and holding them, the name of a node, errors that last."""
