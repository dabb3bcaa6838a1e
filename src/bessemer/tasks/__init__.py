"""Evaluation tasks: multiple choice, cloze, exact match and bits per byte, from small files, while a model trains and after."""
