"""Starts the run of a RUN.toml on a cluster: one module for each engine, all from one description of nodes."""
