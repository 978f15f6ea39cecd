"""Run the same offline work in chatcache and other engines; see `README.md`."""
