"""Collectives as pure data: the steps of every algorithm, their counted cost, and a symbolic check."""
