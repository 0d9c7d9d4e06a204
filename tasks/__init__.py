"""Tasks: their problems, base models and supervised starts.

An embedded task is a module with TRAIN_PROBLEMS and problem(split, index), and a row in data.py's
table EMBEDDED, which adds its splits, its reward and the room for a completion.

May import: tasks, runtime and chat_format, because data.py and models.py import tasks.
Only sft, which is a program, may import the root.
"""
