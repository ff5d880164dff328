"""The consumer side: takes messages from the broker, runs tasks in a pool, reports and settles."""
