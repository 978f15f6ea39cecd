"""Load a model folder: configuration, weights, memory budget, back ends. Start at `loader`."""
