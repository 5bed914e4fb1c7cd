"""Plans as configurations of other trainers, and their configurations as layouts."""
