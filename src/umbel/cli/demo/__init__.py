"""`umbel demo`: a whole cluster in a temporary directory, with every result checked."""
