"""Tasks: their problems, base models and supervised starts.

May import: tasks, runtime and packing, because data.py and models.py import tasks. Only sft, which
is a program, may import the root.
"""
