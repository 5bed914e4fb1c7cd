"""Matrix products on grids of ranks: parts, words (elements), bounds, rounds of collectives, and the choice of a
grid."""
