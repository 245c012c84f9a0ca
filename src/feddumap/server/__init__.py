"""The `server` slot: what the server does to the aggregated model."""
