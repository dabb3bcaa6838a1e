"""The Python API: documents, tokens, runs and plans as objects.

Use it as `import bessemer as bs`: `bessemer/__init__.py` loads each name when it is first used.
"""
