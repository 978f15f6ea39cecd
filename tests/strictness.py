"""How many pages a pool may have that is gone through whole whenever nobody holds any: 20 ms at most."""

MAX_STRICT_PAGES = 20_000
