"""Collectives as pure data: steps of every algorithm, their cost by counting, and a check by symbols."""
