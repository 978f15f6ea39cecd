"""Exit codes of the command; 2 is typer's own for wrong usage."""

DRAINED = 0
ERROR = 1
CONFIG = 78  # EX_CONFIG of sysexits.h: the model folder or a setting is wrong; restarting will not help
KILLED = 130
