"""The same offline work through chatcache and its peers on CPUs, side by side. `README.md` says how to run it."""
