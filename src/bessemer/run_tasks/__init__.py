"""Tasks, and where they run: in this process, in local worker processes, on Ray, or in job arrays of Slurm.

A task is a frozen value whose result is a folder, published by one rename with a receipt.
"""
