"""The `chatcache` command. Start at `main`; every flag stands in `options`."""
