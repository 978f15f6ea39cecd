"""A running reply: candidates, parsed deltas and numbered events. Start at `service`."""
