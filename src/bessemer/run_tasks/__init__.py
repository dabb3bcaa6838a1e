"""Tasks and their executors: this process, local worker processes, Ray, or job arrays of Slurm.

A task is a frozen value whose result is a folder, published by one rename with a receipt.
"""
