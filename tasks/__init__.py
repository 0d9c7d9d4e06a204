"""Tasks: their problems, base models and supervised starts.

An embedded task is a module with TRAIN_PROBLEMS and problem(split, index), and a row in data.py's
table EMBEDDED, which adds its splits, its reward and the room for a completion.

arithmetic, word_problems and gguf import packing and runtime only, because data.py and models.py
import them. sft is a program on top of both.
"""
