"""Tasks: their problems, base models and supervised starts.

arithmetic, word_problems and gguf import packing and runtime only, because data.py and models.py
import them. sft is a program on top of both.
"""
