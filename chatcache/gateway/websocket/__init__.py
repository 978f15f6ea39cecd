"""The WebSocket endpoint: connection, frames, multiplexed streams and notifications."""
