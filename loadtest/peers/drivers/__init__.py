"""One file per engine, run by that engine's own Python; nothing here imports chatcache (save its own driver)."""
