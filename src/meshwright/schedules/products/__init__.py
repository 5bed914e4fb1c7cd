"""Matrix products on grids of ranks: parts, words, bounds, rounds of collectives, and the choice of a grid."""
