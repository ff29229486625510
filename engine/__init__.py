"""Scheduling and running: requests, steps, the model. The modules that the server may import load no torch."""
