"""Remote control: how messages come in, and what they can ask for."""
