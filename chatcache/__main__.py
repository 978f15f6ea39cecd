"""`python -m chatcache` is the `chatcache` command."""

from chatcache.cli.main import main

if __name__ == "__main__":
    main()
