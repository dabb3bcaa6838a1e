"""Scaling experiments on the user's own tokens: small runs that predict a large one, and a mixture search."""
