"""A worker, the consumer that lives as long as one connection, and the loop that both run on."""
