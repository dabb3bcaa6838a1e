"""Small runs that say what a large one will do: a scaling law on the user's own tokens, and a search for their mixture."""
