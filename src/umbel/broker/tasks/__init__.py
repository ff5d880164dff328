"""Task messages on a broker: their layout, publishing them, and the channel that brings them."""
