"""Building blocks of the models: each takes its weights and kernels, and holds no hidden state."""
