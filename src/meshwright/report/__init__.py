"""What people look at: traces and pages. It reads the nouns of `ir`, and runs nothing."""
