"""Choose the stages of a pipeline together with the submesh of every stage."""
