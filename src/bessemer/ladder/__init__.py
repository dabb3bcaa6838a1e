"""Scaling experiments on the user's own tokens: small runs that predict the loss of a large one."""
