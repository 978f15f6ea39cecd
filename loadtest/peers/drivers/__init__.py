"""One script per engine, run by that engine's Python; only chatcache's imports chatcache."""
