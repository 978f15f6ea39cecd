"""`chatcache doctor`: what this machine has, what is missing, and what to do about it.

command.py    the command: checks in order, a line each
findings.py   what a check found
machine.py    Python, processor, GPU, memory, folders
store.py      what a Redis server keeps, what its user may, who is let in
settings.py   model, database, port, page: what `chatcache serve` would meet
server.py     a running server by its URL, with whatever stands between
"""
