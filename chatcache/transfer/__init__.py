"""Export, import and archives of stored conversations. Start at `format`."""
