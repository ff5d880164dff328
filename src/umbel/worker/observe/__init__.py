"""What a worker lets others see: task events, metrics, health, logs."""
