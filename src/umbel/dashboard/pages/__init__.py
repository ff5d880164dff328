"""What each page tells, as plain data ready for JSON; templates and the API only show it."""
