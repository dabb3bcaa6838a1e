"""Arithmetic of a run: what it derives from one dial, what it computes, holds and takes. Numbers only, no tensors."""
