"""What is broadcast and answered: events, control messages and their replies."""
