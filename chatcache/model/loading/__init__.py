"""Load a model folder: configuration, weights, memory budget, backends.

Reading order: `loader`, `files`, `config_reader`, `weights`, `memory_budget`.
"""
