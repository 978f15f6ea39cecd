"""The Responses API: create, run, log, resume and store responses."""
